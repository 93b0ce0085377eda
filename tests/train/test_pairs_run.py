"""A run on images and text from end to end: trained on two devices, exported, asked about an image, imported."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

import k3jax
from k3jax.cli import main
from k3jax.config import VisionConfig
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import loop

VISION = VisionConfig(4, 6, 5, 4, 3, 2, 32, 64, 48, 32, 32, media_placeholder_token_id=255)
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    lines = []
    for i in range(40):
        name = list(COLOURS)[i % 2]
        Image.new("RGB", (8 + 8 * (i % 3), 8), COLOURS[name]).save(folder / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "text": f"it is {name}, see?"}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    config = RunConfig(
        model=dataclasses.replace(tiny, vision=VISION, initializer_range=0.1),  # a large start learns sooner
        data=DataConfig(pairs=(str(folder / "pairs.jsonl"),), seq_len=32, batch_size=8, held_out=0.2),
        train=TrainConfig(steps=60, learning_rate=1e-2, checkpoint_every=100, log_every=10, eval_windows=8, qat=False),
        mesh=MeshConfig(fsdp=2),
        out=str(folder / "run"),
    )
    return folder, config, loop.train(config)


def test_images_are_learnt_from(run):
    """Nothing but the image tells red from blue; without it no model comes below ln 2 a caption, 0.055 a byte."""
    _, _, result = run
    assert result.train_loss < 0.02 and result.held_out_loss < 0.02


def test_its_export_answers_about_an_image(run, capsys):
    folder, _, result = run
    assert main(["convert", "export", str(result.checkpoint), str(folder / "released")]) == 0
    for name, colour in COLOURS.items():
        path = str(folder / f"new {name}.png")
        Image.new("RGB", (12, 10), colour).save(path)
        capsys.readouterr()
        options = ["--image", path, "--prompt", "it is ", "--max-tokens", str(len(name)), "--temperature", "0"]
        assert main(["generate", str(folder / "released"), *options]) == 0
        assert capsys.readouterr().out.strip() == name


def test_mistakes_are_one_line(run, capsys, tmp_path):
    folder, config, result = run
    image = str(folder / "0.png")
    for options, message in (
        (["--image", str(tmp_path / "none.png"), "--prompt", "a"], "none.png: no such file"),
        (["--image", image, "--prompt", "<image><image>"], "found 2 <image> in the text, must be 1 like its images"),
        (["--prompt", "<image>"], "found 1 <image> in the text, must be 0"),
    ):
        assert main(["generate", str(result.checkpoint), *options]) == 2
        assert message in capsys.readouterr().err
    for change, message in (
        ({"paths": ("a.txt",)}, "data.paths=a.txt: must be empty beside data.pairs"),
        ({"pairs": ("none.jsonl",)}, "data.pairs: none.jsonl: cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.train(dataclasses.replace(config, data=dataclasses.replace(config.data, **change)))
    with pytest.raises(ValueError, match="data.pairs=.*: must be empty: the model has no vision"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, vision=None)).validate()
    with pytest.raises(ValueError, match=r"model.vision.vt_hidden_size=32: must be a multiple of mesh.fsdp=64"):
        tower = dataclasses.replace(VISION, text_hidden_size=64)
        wide = dataclasses.replace(config.model, hidden_size=64, moe_intermediate_size=64, vision=tower)
        dataclasses.replace(config, model=wide, mesh=MeshConfig(fsdp=64), data=DataConfig(batch_size=64)).validate()


def test_import_keeps_the_tower(run, tmp_path):
    folder, _, result = run
    out = folder / "again"
    if not (folder / "released").exists():
        assert main(["convert", "export", str(result.checkpoint), str(folder / "released")]) == 0
    assert main(["convert", "import", str(folder / "released"), str(tmp_path / "imported")]) == 0
    assert main(["convert", "export", str(tmp_path / "imported"), str(out)]) == 0
    a, b = (k3jax.load_hf(path)["params"]["vision_tower"]["blocks"]["wqkv"] for path in (folder / "released", out))
    np.testing.assert_array_equal(a, b)
