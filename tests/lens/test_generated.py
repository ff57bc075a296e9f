"""Generated code, parsed once: never an exception, whatever it looks like."""

from __future__ import annotations

import audit_cases as cases
import pytest
import torch

from omni_kv.lens.capture import capture
from omni_kv.lens.clones import clones_of
from omni_kv.lens.generated import parse

CODE = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
}
''')

triton_poi_1 = async_compile.triton('triton_poi_1', '''
@triton.jit
def triton_poi_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
''', device_str='cuda')

def call(args):
    arg0_1, = args
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
        cpp_fused_0(arg0_1, buf0)
        triton_poi_1.run(reinterpret_tensor(buf0, (4, ), (1, ), s0 + 4), buf1, 4, stream=stream0)
        buf2 = torch.ops.audit_cases.write.default(buf0, arg0_1)
    return (buf2, )
"""


def test_calls_have_their_buffers_and_offsets_and_kernels_their_parameters() -> None:
    code = parse(CODE)
    assert code is not None
    allocate, first, second, op = code.calls
    assert (allocate.result, allocate.target) == ("buf0", "empty_strided_cpu")
    assert first.buffers == ("arg0_1", "buf0")
    assert second.target == "triton_poi_1"
    assert second.buffers == ("buf0", "buf1", None)
    assert [a.offset for a in second.arguments] == ["s0 + 4", "0", "0"]
    assert (op.result, op.target) == ("buf2", "torch.ops.audit_cases.write.default")
    assert code.kernels["cpp_fused_0"].parameters == ("in_ptr0", "out_ptr0")
    assert code.kernels["triton_poi_1"].parameters == ("in_ptr0", "out_ptr0", "xnumel", "XBLOCK")


def test_the_loads_of_the_kernel_between_two_buffers_are_found() -> None:
    code = parse(CODE)
    assert code is not None
    call, loads = code.copies("arg0_1", "buf0")
    assert call.text == "cpp_fused_0(arg0_1, buf0)"
    assert loads == ["auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];"]
    assert code.copies("buf0", "buf1")[1] == ["tmp0 = tl.load(in_ptr0 + (x0), xmask)"]
    assert code.copies("arg0_1", "buf1") is None


@pytest.mark.parametrize("code", [None, "", "def call(:", "\0", "x = 1", "call()", "a.b = c(1)(2)"])
def test_other_text_gives_a_record_without_kernels_or_none(code) -> None:
    parsed = parse(code)
    assert parsed is None or not parsed.kernels


def test_every_beginning_of_generated_code_can_be_read() -> None:
    found = [parse(CODE[:end]) for end in range(len(CODE))]
    assert any(parsed is None for parsed in found)
    calls = [len(parsed.calls) for parsed in found if parsed is not None]
    assert calls == sorted(calls)
    assert calls[-1] == 4


def test_a_clone_is_found_with_its_kernel_and_a_callers_own_clone_is_none() -> None:
    with torch.no_grad():
        fn, args = cases.make_shared()
        graph = capture(fn, *args).graphs[0]
        (clone,) = clones_of(graph)
        assert clone.source is not None
        assert clone.source.name == "value_pool"
        assert graph.generated is not None
        assert graph.generated.copies(clone.read.buffer, clone.writes) is not None
        fn, args = cases.make_old_value_needed()
        graph = capture(fn, *args, until="graph").graphs[0]
        assert all(c.read is None for c in clones_of(graph))
        refused = [d for d in graph.decisions if not d.reinplaced]
        assert len(clones_of(graph)) == len(refused)
        fn, args = cases.make_separate()
        assert clones_of(capture(fn, *args, until="graph").graphs[0]) == []
