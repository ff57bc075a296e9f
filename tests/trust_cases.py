"""Programs that compiled code gets wrong by other means than a clone, each with a harmless twin."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import torch


def keep(previous, state, delta):
    """Wrong on torch 2.11.0 if compiled by itself, right behind a frame of ours."""
    previous[:] = state[:]
    state.add_(delta)
    return delta * 2


def make_keep():
    return keep, (torch.zeros(32), torch.ones(32), torch.full((32,), 0.5))


@torch.library.custom_op("trust_cases::lies", mutates_args=())
def lies(x: torch.Tensor) -> torch.Tensor:
    """Writes to an argument that its schema does not name."""
    x.add_(1)
    return x.clone()


lies.register_fake(lambda x: torch.empty_like(x))


def undeclared(x):
    return lies(x)


@torch.library.custom_op("trust_cases::off_by", mutates_args=("out",))
def off_by(out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    """Writes ``x``, and something else where it is called by compiled code."""
    out.copy_(x if not COMPILED else x * factor)


off_by.register_fake(lambda out, x, factor: None)

#: Set by whoever lets compiled code run: eager calls read False.
COMPILED = False


def in_compiled_code(x: torch.Tensor) -> torch.Tensor:
    """``x``, times 1.5 in compiled code: a fault that is built in."""
    return x * 1.5 if torch.compiler.is_compiling() else x.clone()


def tiny_values(out, x):
    """All of it is wrong, and all of it is small."""
    out.copy_(in_compiled_code(x))


def make_tiny_values():
    return tiny_values, (torch.zeros(64), torch.full((64,), 1e-6))


def tiny_values_right(out, x):
    out.copy_(x * 3.0)


STATE = torch.zeros(8)


@dataclasses.dataclass
class Result:
    """A result that is no tuple."""

    value: torch.Tensor


def in_a_dataclass(x):
    return Result(in_compiled_code(x))


def in_a_dataclass_right(x):
    return Result(x * 3.0)


class Holder:
    """An object that holds state."""

    def __init__(self) -> None:
        self.state = torch.zeros(8)


HOLDER = Holder()


@torch.compiler.disable
def drop_in_compiled(x):
    return x


def in_a_global(x):
    if not torch.compiler.is_compiling():
        STATE.add_(x)
    return x * 2


def in_a_global_right(x):
    STATE.add_(x)
    return x * 2


inner = torch.compile(in_compiled_code)


def partly_compiled(x):
    return inner(x) + 1


@torch.library.custom_op("trust_cases::scaled", mutates_args=("out",))
def scaled(out: torch.Tensor, scale: torch.Tensor) -> None:
    """Takes positive scales only."""
    if not bool((scale > 0).all()):
        raise ValueError("scales must be positive")
    out.add_(scale)
    scale.mul_(1)


scaled.register_fake(lambda out, scale: None)


@torch.library.custom_op("trust_cases::grow", mutates_args=("scale",))
def grow(scale: torch.Tensor) -> None:
    """Takes positive scales only, and changes them."""
    if not bool((scale > 0).all()):
        raise ValueError("scales must be positive")
    scale.mul_(2)


grow.register_fake(lambda scale: None)


def make_grow():
    return (lambda scale: grow(scale)), (torch.ones(16),)


def dropout(pool, x):
    pool.copy_(torch.nn.functional.dropout(x, 0.5))


@torch.library.custom_op("trust_cases::no_compile", mutates_args=("x",))
def no_compile(x: torch.Tensor) -> None:
    """Has a fake that raises: eager works, compiled does not."""
    x.add_(1)


@no_compile.register_fake
def _(x):
    raise RuntimeError("this fake implementation always raises")


def compile_raises(x):
    no_compile(x)


def beyond(x):
    """Eager refuses to look past the storage."""
    if not torch.compiler.is_compiling():
        return x.as_strided((20,), (1,), 0)
    return x * 2


def make_with_a_lock():
    """A callable that cannot be pickled: the command line has the child make it."""
    return Locked(), (torch.zeros(8), torch.ones(8))


class Locked(torch.nn.Module):
    """A module with a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, pool, x):
        pool.add_(x)
        return x * 2


def returns_itself(x):
    """Eager returns its argument, compiled a copy."""
    return x.clone() if torch.compiler.is_compiling() else x


def times_one(x):
    """On some releases compiled code hands the argument back: pytorch/pytorch issue 197893."""
    return x * 1.0


def returns_itself_right(x):
    x.add_(1)
    return x, x[2:], x.view(torch.int32)


def returns_less(x):
    """Compiled leaves a result out."""
    return (x + 1,) if torch.compiler.is_compiling() else (x + 1, x + 2)


def returns_less_right(x):
    return x + 1, x + 2


def strides(x):
    """Equal values in another order of memory: no fault by itself."""
    y = x.view(2, 4) * 2
    return y.t().contiguous().t() if torch.compiler.is_compiling() else y


SET = "torch.float64, deterministic True, high, autocast True"


@torch.compiler.assume_constant_result
def settings_of_torch() -> str:
    """What a caller may have set for all that follows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision, autocast = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_default_dtype()
    return f"{dtype}, deterministic {deterministic}, {precision}, autocast {autocast}"


def only_as_set(pool):
    """Works in no process but one whose settings are those of ``SET``."""
    seen = settings_of_torch()
    if seen != SET:
        raise RuntimeError(seen)
    return pool.add_(1)


def slides_left(buffer, x):
    """Overlapping copy: right in the order of the rows, a race where threads share the rows."""
    buffer[:-1] = buffer[1:].clone()
    return x * 2


def slides_left_right(buffer, x):
    """The same through a tensor of its own, which the compiler may not see through."""
    buffer[:-1] = rows_behind(buffer)
    return x * 2


@torch.library.custom_op("trust_cases::rows_behind", mutates_args=())
def rows_behind(buffer: torch.Tensor) -> torch.Tensor:
    """All rows but the first, in memory of their own."""
    return buffer[1:].clone()


rows_behind.register_fake(lambda buffer: buffer.new_empty(buffer.shape[0] - 1, *buffer.shape[1:]))


def make_slides_left():
    return slides_left, (torch.arange(1024 * 2048.0).view(1024, 2048), torch.ones(2048))


def make_slides_left_right():
    return slides_left_right, make_slides_left()[1]


@torch.library.custom_op("trust_cases::end", mutates_args=("pool",))
def end(pool: torch.Tensor, how: str) -> None:
    """Ends the process, or the one that it is a fork of, where compiled code calls it."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "child killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif how == "no memory":
        raise MemoryError
    elif how == "crashed":
        os.kill(os.getpid(), signal.SIGSEGV)
    pool.add_(1)


end.register_fake(lambda pool, how: None)


def ends(pool, how):
    end(pool, how if torch.compiler.is_compiling() else "well")


def wrong_with_grad(x):
    return in_compiled_code(x) if torch.is_grad_enabled() else x * 3.0


def wrong_in_inference_mode(x):
    return in_compiled_code(x) if torch.is_inference_mode_enabled() else x * 3.0


def make_wrong_with_grad():
    return wrong_with_grad, (torch.ones(8),)
