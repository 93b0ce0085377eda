"""The model: embedding of text and images, segments of scanned layers, the mixture over depth, and the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.cache import Cache, check_cache, with_rows, written
from k3jax.config import LayerKind, ModelConfig
from k3jax.derivative import by_hand
from k3jax.nn.layers import DenseFFN, Policy, embed, project, rms_norm, weight
from k3jax.nn.mixers import KimiDeltaAttention, LatentAttention
from k3jax.nn.moe import LatentMoE, expert_stacks
from k3jax.nn.vision import Projector, VisionTower, place_images
from k3jax.ops.attnres import attnres_mix, keep_depth, read_depth
from k3jax.ops.ids import in_range, refuse_unknown
from k3jax.rules import multiple
from k3jax.sharding import along, constrain, current_mesh, filled, tree_shardings, ways
from k3jax.vision.batch import Images, enlarged, pack, prepare


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
    tape: Array | None
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
            where = inputs["repeat"], inputs["places"], inputs["present"]
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

    function = by_hand(forward)
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
        remat = self.remat and cache is None and not self.is_initializing()
        layer_type = Layer
        if remat and self.policy.forward_mode:
            layer_type, remat = nn.remat(Layer, prevent_cse=False), False
        for j, kind in enumerate(self.kinds):
            index = first_layer + j
            starts = index % (self.cfg.attn_res_block_size or 1) == 0
            name = f"layer_{j}"
            own = inputs | {"repeat": repeat, "experts": (inputs["experts"] or {}).get(name)}
            layer = layer_type(self.cfg, self.policy, kind, name=name)
            if remat:
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

        On a mesh, rows and tokens are filled up with padding to what it splits evenly, and what returns is cut again.

        Args:
            tokens: ids 0..vocab-1. Others are refused where their values are known; in a traced program, and where mask
                or segment_ids is 0 (which is not looked at), they embed as zeros.
            mask: [B,T], 1 for real tokens, 0 for padding on either side. Padded positions hold no meaning.
            segment_ids: [B,T], 1-based documents packed in a row, non-decreasing where not 0 = padding. Without a cache.
            cache: from `init_cache` or an earlier call, with room for T more tokens. In a traced program, which does
                not know its length, tokens beyond the room change nothing in it; their hidden and logits are NaN.
            pixel_values, grid_thws: patches [n,3,p,p] of all images and [images,3] their frames, rows and columns;
                `tokens` holds one placeholder an image. T widens as the images say, so all are concrete. Under
                `jax.jit`, call `k3jax.vision.prepare` outside, and give its `Images` as pixel_values alone.

        Raises:
            ValueError: segment_ids together with a mask or a cache, shapes or sizes that do not fit, a full cache, an
                unknown token, or not as many placeholders as images.
        """
        cfg, mesh = self.cfg, current_mesh()
        if isinstance(pixel_values, Images) and grid_thws is None and cfg.vision:
            images = pixel_values
        elif pixel_values is None and grid_thws is None:
            images = None
        else:
            prepared = prepare(cfg, tokens, pixel_values, grid_thws, mask, segment_ids, ways("seq", mesh))
            tokens, mask, segment_ids, images = jax.tree.map(jnp.asarray, prepared)
        if tokens.ndim != 2 or not tokens.size:
            raise ValueError(f"tokens: found shape {tokens.shape}, must be [B,T]")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: found dtype {tokens.dtype}, must be integers")
        B, T = tokens.shape
        for name, array in (("mask", mask), ("segment_ids", segment_ids)):
            if array is not None and array.shape != (B, T):
                raise ValueError(f"{name}: found shape {array.shape}, must be {(B, T)} like tokens")
        if segment_ids is not None and (mask is not None or cache is not None):
            other = "mask" if mask is not None else "cache"
            raise ValueError(f"segment_ids: cannot be combined with {other}; segment 0 is padding, a cached row is one text")
        if images is not None and images.ids.shape[0] != B:
            raise ValueError(f"pixel_values: found images of {images.ids.shape[0]} rows, must be {B} like tokens")
        ids = segment_ids if mask is None else mask.astype(bool)
        refuse_unknown(tokens, cfg.vocab_size, ids)
        if cache is not None:
            check_cache(cfg, cache, B, T)

        # From here on rows and width are what the mesh splits evenly; empty rows and tokens are padding.
        rows, width = _even(cache.rows if cache else B, T, 0 if cache else cfg.short_conv_kernel_size - 1)
        start, places, present = jnp.zeros((), jnp.int32), None, None
        if cache is not None or (rows, width) != (B, T):
            ids = jnp.ones((B, T), jnp.int32) if ids is None else ids
        ids = None if ids is None else filled(ids.astype(jnp.int32), (rows, width))
        tokens = filled(in_range(tokens, cfg.vocab_size), (rows, width), cfg.vocab_size)
        if images is not None:
            room = multiple(images.ids.shape[1], cfg.vision.cell * ways("seq", mesh))
            images = enlarged(images, rows, room, cfg.vision)
        if cache is not None:
            given, cache = cache, with_rows(cache, rows)
            start = cache.length
            fits = start + jnp.arange(width, dtype=jnp.int32) < cache.max_len
            ids = jnp.where(fits[None], ids, 0)
            places = start + jnp.arange(T, dtype=jnp.int32)
            present = written(cache.present, ids[:, :T], (jnp.zeros((), jnp.int32), start), 1)
        attention_ids = jnp.ones((rows, width), jnp.int32) if ids is None else ids
        inputs = {"ids": ids, "attention_ids": attention_ids, "places": places, "present": present, "experts": None}

        seq = along("seq", width)
        if images is None:
            x = embed(self.embed_tokens, tokens)
        else:
            # On CPUs the collectives of `embed` and of the tower, which do not depend on each other, can lock each other out.
            x = constrain(jnp.take(self.embed_tokens, tokens, axis=0, mode="fill", fill_value=0), "batch", seq, None)
            features = self.mm_projector(self.vision_tower(images))
            x = place_images(x, features, tokens, images, cfg.vision.media_placeholder_token_id)
        sources = jnp.zeros((cfg.num_attn_res_blocks + 1, *x.shape), x.dtype).at[0].set(x)
        place = lambda x: constrain(x, None, "batch", seq, None)  # noqa: E731
        tape = None if self.policy.forward_mode else place(jnp.zeros_like(sources))
        depth = Depth(place(sources), tape, jnp.zeros((), jnp.int32))
        layers, router, first = {}, {}, 0
        for s, (unit, repeats) in enumerate(cfg.segments):
            name = f"segment_{s}"
            repeat = jnp.arange(repeats, dtype=jnp.int32)
            if cache is not None and self.experts == "packed" and ways("expert_out", mesh) == 1:
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
            hidden = jnp.where(fits[None, :, None], hidden, jnp.nan)
            cache = with_rows(given.replace(length=start + T, present=present, layers=layers), given.rows)
        return Output(self.unembed(hidden)[:B, :T], hidden[:B, :T], cache, router)

    def unembed(self, hidden: Array) -> Array:
        """head(RMSNorm(hidden)): [B,T,D] -> [B,T,vocab]."""
        B, T = hidden.shape[:2]
        hidden = filled(hidden, _even(B, T))
        logits = constrain(project(*self.head_inputs(hidden)), "batch", along("time", hidden.shape[1]), "vocab")
        return logits[:B, :T]

    def head_inputs(self, hidden: Array) -> tuple[Array, Array]:
        """RMSNorm(hidden) [..., T, D] and the head [vocab, D], whose product are the logits."""
        return rms_norm(hidden, self.norm, self.cfg.rms_norm_eps), self.head


def _even(B: int, T: int, least: int = 0) -> tuple[int, int]:
    """Rows and tokens of a row, at least B and T, that the current mesh splits evenly; the latter into parts of `least`
    tokens or more. A single token is not split."""
    mesh = current_mesh()
    rows, context = multiple(B, ways("batch", mesh)), ways("time", mesh)
    if T == 1:
        return rows, 1
    return rows, multiple(max(T, least * context if context > 1 else 0), ways("seq", mesh))


def init_variables(model: K3, key: Array):
    """`model.init` on the smallest batch the current mesh can split; leaves carry their logical axes."""
    mesh = current_mesh()
    tokens = jnp.zeros((ways("batch", mesh), 4 * ways("seq", mesh)), jnp.int32)
    vision = model.cfg.vision
    images = vision and pack(vision, [[]] * len(tokens), room=vision.cell * ways("seq", mesh))
    variables = model.init(key, tokens, pixel_values=images)
    return {name: variables[name] for name in ("params", "router") if name in variables}


def model_shardings(cfg: ModelConfig, mesh, experts: str = "dequantized"):
    """NamedShardings of a model's variables, in a tree like what `load_hf` returns."""
    return tree_shardings(jax.eval_shape(lambda: init_variables(K3(cfg, experts=experts), jax.random.key(0))), mesh)
