"""A training checkpoint becomes a folder that transformers opens, with the model's own logits."""

import pytest
import torch

from common.command_line import parse
from common.export import main
from common.initialisation import allocate_parameters
from common.model import Decoder
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.train import train
from tests.parity.runs import SMALL


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_checkpoint_has_the_models_logits(tmp_path, dtype, capsys):
    from transformers import AutoModelForCausalLM

    flags = f"--dtype {dtype} --steps 3 --save-every 2 --kv-heads 1 --vocab 384 --run-dir {tmp_path / 'run'}"
    config = parse(1, [*SMALL.split(), *flags.split()])
    config.resolve_and_check(1)
    trained = {p.spec.name: p.detach() for p in train(config, build_mesh(Degrees(), torch.device("cpu")))}
    model = Decoder(config.model_config)
    allocate_parameters(model, lambda parameter: trained[parameter.spec.name])
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "step-00000003" in capsys.readouterr().out, "the last step is saved, and the newest exported"

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype))
    theirs = dict(exported.named_parameters())
    for ours in model.parameters():
        if ours.spec.name == "layers.1.mlp.up_proj.weight":
            assert torch.equal(theirs["model.layers.1.mlp.up_proj.weight"], ours), "bit for bit"
    tokens = torch.randint(3, 259, (2, 20))
    with torch.no_grad():
        expected, found = model(tokens), exported(tokens).logits
        assert torch.linalg.norm(found - expected) / torch.linalg.norm(expected) < (
            2e-6 if dtype == "float32" else 2e-2
        )
        assert exported.generate(tokens[:1], max_new_tokens=5, do_sample=False).shape[1] > 20


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'nothing'}: there is no complete checkpoint")
    assert main(["auto", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ./auto: there is no complete checkpoint")
