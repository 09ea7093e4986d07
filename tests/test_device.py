import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from filelock import FileLock
from forked import assert_refused

from runtime.compiler import compile_error, prepare_compiler
from runtime.device import (
    NVIDIA_DRIVER,
    device_name,
    is_out_of_memory,
    memory_gib,
    peak_memory_gib,
    select_device,
    synchronize,
)
from runtime.precision import inference, select_dtype

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA GPU")
no_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA GPU")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
posix_only = pytest.mark.skipif(os.name != "posix", reason="needs a shell, or its resource usage")


@no_cuda
def test_select_device_is_what_there_is_and_names_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # containers see the driver of their host
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert select_device("auto").type == (accelerator.type if accelerator else "cpu")
    assert select_device("cpu", local_rank=5) == CPU
    with pytest.raises(ValueError, match=r"--device cuda is not available here: use .*cpu"):
        select_device("cuda")


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((8, 9), False)])
def test_gpu_that_torch_has_no_kernels_for_is_refused(monkeypatch, capability, refused):
    known = {"is_available": True, "device_count": 1, "get_device_name": "V100"}
    known |= {"get_device_capability": capability, "get_arch_list": ["sm_75", "sm_90a", "sm_120"]}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    if not refused:
        assert select_device("auto") == torch.device("cuda", 0)
        return
    with pytest.raises(ValueError, match=r"no kernels for V100 \(sm_70\): .* or use --device cpu"):
        select_device("auto")


@no_cuda
@pytest.mark.skipif(NVIDIA_DRIVER.exists(), reason="this machine has a driver of its own")
@posix_only
def test_driver_that_torch_cannot_use_is_refused_with_the_remedy(commands, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("")
    smi.chmod(0o755)
    shown = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    for flags in ((), ("--device=cuda",)):
        refused = commands.run("sample", "--model=./no-such-model", *flags, **shown)
        assert_refused(refused, "has an NVIDIA driver, but torch", "or use --device cpu")
    on_purpose = [((), {"CUDA_VISIBLE_DEVICES": hidden}) for hidden in ("", "-1")]
    for flags, environment in (*on_purpose, (("--device=cpu",), {})):
        done = commands.run("sample", "--model=./no-such-model", *flags, **(shown | environment))
        assert_refused(done, "no-such-model does not exist")


@needs_cuda
def test_gpu_has_a_name_a_dtype_and_memory_and_is_waited_for():
    count, device = torch.cuda.device_count(), torch.device("cuda")
    assert [select_device("auto", rank).index for rank in range(count)] == list(range(count))
    with pytest.raises(ValueError, match=f"--nproc_per_node={count}"):
        select_device("cuda", count)
    major, _ = torch.cuda.get_device_capability()
    expected = torch.bfloat16 if major >= 8 else torch.float16  # Ampere brought bfloat16
    assert select_dtype("auto", device) == expected
    assert device_name(device) == torch.cuda.get_device_properties(0).name
    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_gib(device)
    x = torch.randn(2**13, 2**13, device=device)  # 0.25 GiB
    assert before + 0.24 < peak_memory_gib(device) < memory_gib(device)
    for _ in range(50):
        y = x @ x
    event = torch.cuda.Event()
    event.record()
    synchronize(device)
    assert event.query()
    assert y.isfinite().all()


@linux_only
def test_cpu_has_the_memory_of_the_machine():
    with open("/proc/meminfo") as file:
        total_kib = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    assert memory_gib(CPU) == pytest.approx(total_kib / 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, torch.float32),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, torch.bfloat16),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_select_dtype_is_what_a_cpu_multiplies_fastest(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert select_dtype("auto", CPU) == dtype
    assert select_dtype("float16", CPU) == torch.float16


def test_inference_leaves_cudnn_out_lowers_the_precision_and_puts_all_back():
    q, model = torch.randn(2, 3, 16, 8), torch.nn.Linear(2, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, q, q, is_causal=True)
    before = torch.get_float32_matmul_precision()
    with inference(model, CPU, torch.float32):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.get_float32_matmul_precision() == before
        assert torch.equal(attend(q, q, q, is_causal=True), expected)
    with inference(model, CPU, torch.bfloat16):
        assert torch.get_float32_matmul_precision() == "medium"
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("traced", "advice"),
    [
        (lambda x: x @ torch.ones(3, 3), None),  # a mistake in the model
        (lambda x: print(x), r"with Unsupported \(.*: delete the compile cache .*, or add --no"),
    ],
)
def test_compile_error_is_none_of_a_mistake_in_the_model(traced, advice):
    with pytest.raises(RuntimeError) as raised:
        torch.compile(traced, backend="eager", fullgraph=True)(torch.ones(2, 2))
    problem = compile_error(raised.value)
    assert problem is None if advice is None else re.search(advice, problem)


def test_prepare_compiler_silences_a_warning_of_every_small_model(recwarn):
    warnings.simplefilter("always")
    prepare_compiler.__wrapped__(torch.device("cpu"))
    # As torch 2.11's torch/_inductor/lowering.py warns.
    warnings.warn("\nOnline softmax is disabled on the fly since Inductor decides", stacklevel=1)
    warnings.warn("another one", stacklevel=1)
    warned = [str(each.message) for each in recwarn if each.category is UserWarning]
    assert warned == ["another one"]


@posix_only
def test_prepare_compiler_removes_torn_libraries_and_says_why_it_cannot_work(tmp_path):
    assert "MPS" in prepare_compiler(torch.device("mps"))
    (tmp_path / "ab").mkdir()
    whole, empty, torn, made = (tmp_path / "ab" / f"{name}.main.so" for name in "wetm")
    for library, content in ((whole, b"\x7fELF"), (empty, b""), (torn, bytes(9)), (made, b"")):
        library.write_bytes(content)
    code = "import torch; from runtime import compiler\n"
    code += "print(compiler.prepare_compiler(torch.device('cpu')))"
    environment = os.environ | {"CXX": "no-compiler", "PATH": ""}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "m.lock"):  # another process compiles it at this moment
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, cwd=ROOT, env=environment
        )
    problem = done.stdout
    assert {*(tmp_path / "ab").glob("*.so")} == {whole, made}
    for library in (empty, torn):
        assert f"warning: removed {library}, broken by a killed run\n" in done.stderr
    assert problem.startswith("InvalidCxxCompiler (")  # what torch has wrapped
    assert f": delete the compile cache {tmp_path}, or install a C++ compiler" in problem
    assert problem.count("\n") == 1


@posix_only
def test_peak_memory_gib_grows_with_what_is_used_and_does_not_shrink():
    before = peak_memory_gib(CPU)
    block = b"x" * int(before * 2**30 + 2**27)  # 128 MiB more than ever before
    during = peak_memory_gib(CPU)
    del block
    assert during >= before + 0.1
    assert peak_memory_gib(CPU) >= during


NCCL_ERROR = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"
OUT_OF_MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)"),
    dist.DistBackendError(NCCL_ERROR + "Cuda failure 2 'out of memory'"),
    dist.DistBackendError(NCCL_ERROR + "Failed to CUDA calloc 6291456 bytes"),
]


def test_is_out_of_memory_knows_every_librarys_message_from_other_errors():
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(2**52)
    for error in (too_much.value, *OUT_OF_MEMORY_ERRORS):
        assert is_out_of_memory(error), error
    gone = dist.DistBackendError(NCCL_ERROR + "socketProgress: Connection closed by remote peer")
    for error in (RuntimeError("shapes cannot be multiplied"), gone, OSError("out of memory")):
        assert not is_out_of_memory(error), error
