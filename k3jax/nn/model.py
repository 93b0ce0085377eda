"""The model: embedding of text and images, segments of scanned layers, the mixture over depth, and the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.cache import Cache
from k3jax.config import LayerKind, ModelConfig
from k3jax.nn.layers import DenseFFN, Policy, embed, project, rms_norm, weight
from k3jax.nn.mixers import KimiDeltaAttention, LatentAttention
from k3jax.nn.moe import LatentMoE, expert_stacks
from k3jax.nn.vision import Projector, VisionTower, place_images
from k3jax.ops.attnres import attnres_mix, keep_depth, read_depth
from k3jax.sharding import along, constrain, current_mesh, ways
from k3jax.vision.batch import Images, pack, prepare


@flax.struct.dataclass
class Output:
    """What `K3` returns.

    Attributes:
        logits: [B,T,vocab] in the compute dtype. Not computed when nobody reads it under `jax.jit`.
        hidden: [B,T,D] after the last layer's mixture over depth, before the final norm; `K3.unembed` maps it to logits.
        cache: the cache after these tokens, or None without one.
        router: `RouterStats` of every MoE layer, in a tree like `variables["router"]`.
    """

    logits: Array
    hidden: Array
    cache: Cache | None
    router: dict[str, Any]


class Depth(NamedTuple):
    """The residual state: `sources` [N,B,T,D], of which slots below `count` are finished blocks and slot `count` is the
    running sum. Starting a block is adding one to the count, for the next slot is still zero. Plain residuals have one
    slot. `tape`: see `read_depth`."""

    sources: Array
    tape: Array
    count: Array


class Layer(nn.Module):
    """One decoder layer: two sublayers that each read a mixture of the finished blocks and the running sum.

    Plain residuals have no mixture.
    """

    cfg: ModelConfig
    policy: Policy
    kind: LayerKind

    @nn.compact
    def __call__(self, depth: Depth, starts_block: Array, inputs: dict, cache: dict | None):
        cfg, policy = self.cfg, self.policy
        sources, tape, count = depth
        eps = cfg.rms_norm_eps
        norm = lambda name: weight(self, name, (cfg.hidden_size,), (None,))  # noqa: E731
        seq = along("seq", sources.shape[2])

        def read(name):
            if not cfg.attn_res_block_size:
                return sources[0], sources, tape
            query = weight(self, f"{name}_res_proj", (cfg.hidden_size,), (None,), std=0.0)
            return read_depth(sources, tape, count, query, norm(f"{name}_res_norm"), eps)

        def add(y):
            y = constrain(y, "batch", seq, None)
            return sources.at[count].add(y) if cfg.attn_res_block_size else sources + y[None]

        h, sources, tape = read("self_attention")
        h = rms_norm(h, norm("input_layernorm"), eps)
        h = constrain(h, "batch", along("time", h.shape[1]), None)  # once, for all projections and their derivatives
        count = jnp.where(starts_block, count + 1, count) if cfg.attn_res_block_size else count
        if self.kind.mixer == "kda":
            mixer = KimiDeltaAttention(cfg, policy, name="self_attn")
            y, cache = mixer(h, inputs["ids"], cache, inputs["repeat"])
        else:
            mixer = LatentAttention(cfg, policy, name="self_attn")
            where = inputs["repeat"], inputs["start"], inputs["present"]
            y, cache = mixer(h, inputs["attention_ids"], cache, *where)
        sources = add(y)

        h, sources, tape = read("mlp")
        h = rms_norm(h, norm("post_attention_layernorm"), eps)
        stats = None
        if self.kind.ffn == "moe":
            y, stats = LatentMoE(cfg, policy, name="block_sparse_moe")(
                h, inputs["attention_ids"] > 0, inputs["experts"], inputs["repeat"]
            )
        else:
            y = DenseFFN(cfg, policy, cfg.intermediate_size, name="mlp")(h)
        sources = add(y)
        prefix = sources[count] if cfg.attn_res_block_size else sources[0]
        self.sow("intermediates", "prefix_sum", prefix)
        return Depth(sources, tape, count), cache, stats


def recomputed(layer: Layer):
    """`layer` without a cache, as a function of its variables that keeps, for the backward pass, its running sum alone,
    and computes the rest again: (variables, depth, starts_block, inputs) -> (depth, stats).

    Finished blocks come back as in `read_depth`.
    """

    def forward(variables, depth, starts_block, inputs):
        depth, _, stats = layer.apply(variables, depth, starts_block, inputs, None)
        return depth, stats

    def keep(variables, depth, starts_block, inputs):
        running = lax.dynamic_index_in_dim(depth.sources, depth.count, 0, keepdims=False)
        return forward(variables, depth, starts_block, inputs), (variables, running, depth.count, starts_block, inputs)

    def backward(kept, cotangents):
        variables, running, count, starts_block, inputs = kept
        (d_sources, values, _), _ = cotangents
        # Else a compiler that unrolls the loop over layers finds both passes alike and keeps what the first computed.
        running, values, d_sources = lax.optimization_barrier((running, values, d_sources))
        slot = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None, None, None]
        values = jnp.where(slot < count, values, jnp.where(slot == count, running[None], jnp.zeros((), values.dtype)))

        def again(params, sources):
            depth = Depth(sources, jnp.zeros_like(sources), count)
            depth, _ = forward(variables | {"params": params}, depth, starts_block, inputs)
            return keep_depth(depth.sources, depth.tape)

        _, pull = jax.vjp(again, variables["params"], values)
        # Else a layer's gradients wait, with all that they are made of, until the layers before it are done.
        d_params, d_sources = lax.optimization_barrier(pull(d_sources))
        return {name: d_params if name == "params" else None for name in variables}, Depth(d_sources, values, None), None, None

    function = jax.custom_vjp(forward)
    function.defvjp(keep, backward)
    return function


class Unit(nn.Module):
    """A segment's unit of layers, the body that `nn.scan` repeats."""

    cfg: ModelConfig
    policy: Policy
    kinds: tuple[LayerKind, ...]
    remat: bool = False

    @nn.compact
    def __call__(self, carry: tuple[Depth, dict | None], at: tuple[Array, Array], inputs: dict):
        """The carry is the residual state and the caches of all repeats; `at`, which repeat this is and its first layer."""
        (depth, cache), (repeat, first_layer) = carry, at
        new_cache, stats = {}, {}
        for j, kind in enumerate(self.kinds):
            index = first_layer + j
            starts = index % (self.cfg.attn_res_block_size or 1) == 0
            name = f"layer_{j}"
            own = inputs | {"repeat": repeat, "experts": (inputs["experts"] or {}).get(name)}
            layer = Layer(self.cfg, self.policy, kind, name=name)
            if self.remat and cache is None and not self.is_initializing():
                new_cache[name] = None
                depth, layer_stats = recomputed(layer.clone(parent=None, name=None))(layer.variables, depth, starts, own)
            else:
                depth, new_cache[name], layer_stats = layer(depth, starts, own, cache and cache[name])
            if layer_stats is not None:
                stats[name] = {"block_sparse_moe": layer_stats}
        return (depth, cache and new_cache), stats


class K3(nn.Module):
    """A Kimi K3 or Kimi-Linear model.

    Attributes:
        cfg: the model.
        dtype, param_dtype, experts, mxfp8_inputs, kda_impl, expert_impl, capacity_drop: see `Policy`.
        remat: keep no more than a layer's running sum for its backward pass, and compute the rest again.

    Example:
        >>> model = K3(cfg)
        >>> variables = nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32)))
        >>> model.apply(variables, tokens).logits
    """

    cfg: ModelConfig
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    experts: str = "dequantized"
    mxfp8_inputs: bool = False
    kda_impl: str = "auto"
    expert_impl: str = "auto"
    capacity_drop: bool = False
    remat: bool = False

    def setup(self):
        cfg = self.cfg
        if self.experts not in ("dequantized", "qat", "packed"):
            raise ValueError(f"experts: found {self.experts!r}, must be 'dequantized', 'qat' or 'packed'")
        self.policy = Policy(*(getattr(self, name) for name in Policy._fields))
        D, std = cfg.hidden_size, cfg.initializer_range
        self.embed_tokens = weight(self, "embed_tokens", (cfg.vocab_size, D), ("vocab", "embed"), std)
        for s, segment in enumerate(cfg.segments):
            scanned = nn.scan(
                Unit,
                variable_axes={"params": 0, "router": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=segment.repeats,
                in_axes=(0, nn.broadcast),
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            setattr(self, f"segment_{s}", scanned(cfg, self.policy, segment.unit, self.remat))
        if cfg.attn_res_block_size:
            self.output_attn_res_proj = weight(self, "output_attn_res_proj", (D,), (None,), std=0.0)
            self.output_attn_res_norm = weight(self, "output_attn_res_norm", (D,), (None,))
        if cfg.vision:
            self.vision_tower = VisionTower(cfg.vision, self.policy, std, self.remat)
            self.mm_projector = Projector(cfg.vision, self.policy, std)
        self.norm = weight(self, "norm", (D,), (None,))
        self.head = self.embed_tokens
        if not cfg.tie_word_embeddings:
            self.lm_head = self.head = weight(self, "lm_head", (cfg.vocab_size, D), ("vocab", "embed"), std)

    def __call__(
        self,
        tokens: Array,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        cache: Cache | None = None,
        pixel_values: Images | Any = None,
        grid_thws: Any = None,
    ) -> Output:
        """Runs tokens [B,T] int, from the start or on from `cache`.

        Args:
            mask: [B,T], 1 for real tokens, 0 for padding on either side. Padded positions hold no meaning.
            segment_ids: [B,T], 1-based documents packed in a row, non-decreasing where not 0 = padding. Without a cache.
            cache: from `init_cache` or an earlier call; the caller keeps cache.length + T within cache.max_len.
            pixel_values, grid_thws: patches [n,3,p,p] of all images and [images,3] their frames, rows and columns;
                `tokens` holds one placeholder an image. T widens as the images say, so all are concrete. Under
                `jax.jit`, call `k3jax.vision.prepare` outside, and give its `Images` as pixel_values alone.

        Raises:
            ValueError: segment_ids together with a mask or a cache, shapes that do not fit, or not as many placeholders
                as images.
        """
        if isinstance(pixel_values, Images) and grid_thws is None and self.cfg.vision:
            images = pixel_values
        elif pixel_values is None and grid_thws is None:
            images = None
        else:
            devices = ways("seq", current_mesh())
            prepared = prepare(self.cfg, tokens, pixel_values, grid_thws, mask, segment_ids, devices)
            tokens, mask, segment_ids, images = jax.tree.map(jnp.asarray, prepared)
        if tokens.ndim != 2:
            raise ValueError(f"tokens: found shape {tokens.shape}, must be [B,T]")
        B, T = tokens.shape
        for name, array in (("mask", mask), ("segment_ids", segment_ids)):
            if array is not None and array.shape != (B, T):
                raise ValueError(f"{name}: found shape {array.shape}, must be {(B, T)} like tokens")
        if segment_ids is not None and (mask is not None or cache is not None):
            other = "mask" if mask is not None else "cache"
            raise ValueError(f"segment_ids: cannot be combined with {other}; segment 0 is padding, a cached row is one text")
        if cache is not None and cache.present.shape[0] != B:
            raise ValueError(f"cache: found batch {cache.present.shape[0]}, must be {B} like tokens")
        if cache is not None and T > cache.max_len:
            raise ValueError(f"cache: found max_len {cache.max_len}, must hold at least the {T} new tokens")
        cfg = self.cfg
        ids = segment_ids if mask is None else mask
        ids = None if ids is None else ids.astype(jnp.int32)
        attention_ids = jnp.ones((B, T), jnp.int32) if ids is None else ids
        start, present = jnp.zeros((), jnp.int32), None
        if cache is not None:
            start = cache.length
            present = lax.dynamic_update_slice_in_dim(cache.present, attention_ids, start, axis=1)
        inputs = {"ids": ids, "attention_ids": attention_ids, "start": start, "present": present, "experts": None}

        seq = along("seq", T)
        if images is None:
            x = embed(self.embed_tokens, tokens)
        else:
            # On CPUs the collectives of `embed` and of the tower, which do not depend on each other, can lock each other out.
            x = constrain(jnp.take(self.embed_tokens, tokens, axis=0), "batch", seq, None)
            features = self.mm_projector(self.vision_tower(images))
            x = place_images(x, features, tokens, images, cfg.vision.media_placeholder_token_id)
        sources = jnp.zeros((cfg.num_attn_res_blocks + 1, *x.shape), x.dtype).at[0].set(x)
        place = lambda x: constrain(x, None, "batch", seq, None)  # noqa: E731
        depth = Depth(place(sources), place(jnp.zeros_like(sources)), jnp.zeros((), jnp.int32))
        layers, router, first = {}, {}, 0
        for s, (unit, repeats) in enumerate(cfg.segments):
            name = f"segment_{s}"
            repeat = jnp.arange(repeats, dtype=jnp.int32)
            if cache is not None and self.experts == "packed" and ways("expert_out", current_mesh()) == 1:
                # Split over more than the experts, a layer's slice has to be gathered anyway.
                inputs["experts"] = expert_stacks(nn.unbox(self.variables["params"][name]))
            carry, at = (depth, cache and cache.layers[name]), (repeat, first + len(unit) * repeat)
            (depth, layers[name]), stats = getattr(self, name)(carry, at, inputs)
            if stats:
                router[name] = stats
            first += len(unit) * repeats
        hidden = depth.sources[0]
        if cfg.attn_res_block_size:
            sources = keep_depth(depth.sources, depth.tape)
            hidden = attnres_mix(
                sources, depth.count, self.output_attn_res_proj, self.output_attn_res_norm, cfg.rms_norm_eps
            )
        if cache is not None:
            cache = Cache(start + T, present, layers)
        return Output(self.unembed(hidden), hidden, cache, router)

    def unembed(self, hidden: Array) -> Array:
        """head(RMSNorm(hidden)): [..., T, D] -> [..., T, vocab]."""
        return constrain(project(*self.head_inputs(hidden)), "batch", along("time", hidden.shape[1]), "vocab")

    def head_inputs(self, hidden: Array) -> tuple[Array, Array]:
        """RMSNorm(hidden) [..., T, D] and the head [vocab, D], whose product are the logits."""
        return rms_norm(hidden, self.norm, self.cfg.rms_norm_eps), self.head


def init_variables(model: K3, key: Array):
    """`model.init` on the smallest batch the current mesh can split; leaves carry their logical axes."""
    mesh = current_mesh()
    tokens = jnp.zeros((ways("batch", mesh), 4 * ways("seq", mesh)), jnp.int32)
    vision = model.cfg.vision
    images = vision and pack(vision, [[]] * len(tokens), room=vision.cell * ways("seq", mesh))
    variables = model.init(key, tokens, pixel_values=images)
    return {name: variables[name] for name in ("params", "router") if name in variables}
