"""The fused kernels compile for Hopper, within its registers and shared memory: no GPU needed, only Triton's compiler.

The interpreter, under which CI runs the kernels, forgives what the compiler refuses. What is compiled here is what
`launch` was asked for: the same kernels, types, constants and resources as on an H200.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sparselens.gating import op, triton as fused, triton_backward, triton_open, triton_tile  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or op.INTERPRETED, reason="where there is a GPU, the kernels are compiled and run"
)
HOPPER, SHARED = 90, 232_448  # compute capability 9.0; bytes of shared memory that one block may have
FEW = 64  # bytes a thread may keep in memory: some pointers outside the loops, 16 and 32 today
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
}


@pytest.fixture(autouse=True)
def fusion(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is on the machines of today, without a warning


def launches(monkeypatch, work):
    """What `work` would have launched."""
    asked = []
    for module in (fused, triton_backward, triton_open, triton_tile):
        monkeypatch.setattr(module, "launch", lambda *arguments, **options: asked.append((arguments, options)))
    work()
    return asked


def compiled(kernel, _grid, pointers, free, sizes, constants, **options):
    """The kernel as Triton would compile it at its first launch, specialised on the same arguments."""
    signature, known, multiples = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, [*pointers, *free, *sizes, *constants], strict=True)):
        parameter = kernel.params[i]
        special = isinstance(value, int) and not parameter.is_constexpr and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[name], known[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], multiples[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if special and value % 16 == 0:
                multiples[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=multiples)
    return triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)


def spilled(found, folder: Path) -> int:
    """Bytes of registers that a thread has to keep in memory, as the assembler counts them."""
    (folder / "kernel.ptx").write_text(found.asm["ptx"])
    for assembler in (Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"):
        command = [assembler, "-v", f"--gpu-name=sm_{HOPPER}a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:  # Triton brings several, for older and for newer code
            return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
    raise AssertionError(done.stderr)


def check(asked, folder: Path, kernels: set[str]):
    assert {arguments[0].__name__ for arguments, _ in asked} >= kernels
    for arguments, options in asked:
        found = compiled(*arguments, **options)
        name = arguments[0].__name__
        assert found.metadata.shared <= SHARED, f"{name} needs more shared memory than a block has"
        assert spilled(found, folder) <= FEW, f"{name} keeps registers in memory"


@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_training(d_head, monkeypatch, tmp_path):
    """A sampled training step with packed documents and grouped heads, seed in memory as compiled blocks have it."""
    q, k, v = (torch.zeros(2, heads, 512, d_head, dtype=torch.bfloat16) for heads in (6, 2, 2))
    bias, documents = torch.zeros(6), torch.ones(2, 512, dtype=torch.int32)
    how = (d_head**-0.5, True, 0, True, torch.zeros(1, dtype=torch.int32))

    def work():
        out, edges, lse = fused.forward(q, k, v, bias, documents, *how)
        triton_backward.accumulate(out, edges, q, k, v, bias, documents, out, lse, *how)

    check(launches(monkeypatch, work), tmp_path, {"forward_kernel", "rows_kernel", "backward_kernel"})


@pytest.mark.parametrize("queries", [512, 1], ids=["prefill", "decode"])
def test_reading_open_edges_alone(queries, monkeypatch, tmp_path):
    q = torch.zeros(1, 8, queries, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(1, 8, 512, 64, dtype=torch.bfloat16), torch.zeros(1, 8, 512, 64, dtype=torch.bfloat16)
    asked = launches(monkeypatch, lambda: triton_open.open_attention(q, k, v, torch.zeros(8), None, 0.125, True, None))
    check(asked, tmp_path, {"prefill_kernel"} if queries > 1 else {"decode_kernel", "combine_kernel"})


@triton.jit
def uneven_kernel(OUT, N: tl.constexpr):
    tl.store(OUT + tl.arange(0, N), 0.0)


def test_what_the_interpreter_forgives_is_noticed(tmp_path):
    """A tile of 48, which is no power of two."""
    out = torch.zeros(64)
    check([((uneven_kernel, (1, 1), (out,), (), (), (64,)), {})], tmp_path, {"uneven_kernel"})
    with pytest.raises(triton.CompilationError):
        check([((uneven_kernel, (1, 1), (out,), (), (), (48,)), {})], tmp_path, {"uneven_kernel"})


def test_what_does_not_fit_is_noticed(monkeypatch, tmp_path):
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    work = lambda: fused.forward(q, q, q, torch.zeros(2), None, 0.1, True, 0, False, 0)  # noqa: E731
    asked = launches(monkeypatch, work)
    monkeypatch.setitem(globals(), "SHARED", 1000)
    with pytest.raises(AssertionError, match="shared memory"):
        check(asked, tmp_path, {"forward_kernel"})
