import pytest
import torch

from runtime.precision import eval_mode, inference, select_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, torch.float32),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_select_dtype_is_what_a_cpu_multiplies_fastest(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert select_dtype("auto", CPU) == dtype
    assert select_dtype("float16", CPU) == torch.float16


def test_inference_leaves_cudnn_out_lowers_the_precision_and_puts_all_back():
    model = torch.nn.Linear(2, 2)
    before = torch.get_float32_matmul_precision()
    with inference(model, CPU, torch.float32):
        assert not model.training
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.get_float32_matmul_precision() == before
    with inference(model, CPU, torch.bfloat16):
        assert torch.get_float32_matmul_precision() == "medium"
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert model.training
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.get_float32_matmul_precision() == before


def test_eval_mode_restores_the_mode_of_each_module():
    frozen = torch.nn.Dropout(0.5).eval()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), frozen)
    with eval_mode(model):
        assert not model[0].training
    assert model.training
    assert model[0].training
    assert not frozen.training
