"""Run one function in a child process of its own, and report how it ended.

A miscompiled kernel may crash, hang, poison a CUDA context or scribble over memory, and a compile
cache left by one layout changes what the next one does. So every compile experiment runs here: a
process that has compiled nothing of this, a fresh ``TORCHINDUCTOR_CACHE_DIR``, a time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from omni_kv.sandbox.server import command, server_for, share_precompiled_headers

A = TypeVar("A")
T = TypeVar("T")
Env = Mapping[str, str]

_PDEATHSIG = 1  # PR_SET_PDEATHSIG
Status = Literal["returned", "raised", "killed", "timed out"]

#: Settings that every child starts with; ``env=`` overrides them. Scalar C++ loops
#: (``VEC_ISA_OK=0``) read the same addresses as vector loops, compile in 4 s instead of 25 s (the
#: probing of instruction sets is what costs), and show their index expressions plainly.
CHILD_ENV = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a child process ended.

    Attributes:
        status: ``returned``, ``raised``, ``killed`` (by a signal) or ``timed out``.
        value: what the function returned; None unless ``returned``.
        error: type and message of the exception; None unless ``raised``.
        signal: name of the signal, such as ``SIGSEGV``; None unless ``killed``.
        seconds: wall-clock time of the child, its start included.
        stderr_tail: the last 4,000 characters that the child printed.
    """

    status: Status
    value: T | None
    error: str | None
    signal: str | None
    seconds: float
    stderr_tail: str

    def describe(self) -> str:
        """Say in a few words how the child ended, without times or paths."""
        if self.status == "killed":
            return f"killed by {self.signal}"
        if self.status == "raised":
            # A CUDA error goes on over several lines, with advice.
            return f"raised {(self.error or '').partition(chr(10))[0]}"
        return self.status

    def frames(self) -> list[str]:
        """The Python frames of the child's main thread as it died, innermost first.

        They are free of this machine's paths. The file that Inductor wrote has a name made of
        hashes; it is called "generated code".
        """
        frames = []
        # faulthandler lists threads with the newest first: the last one is the main thread.
        main = self.stderr_tail.rpartition("(most recent call first):")[2].partition("\n\n")[0]
        for line in main.splitlines():
            found = re.fullmatch(r'\s*File "(.*)", line (\d+) in (.*)', line)
            if found:
                path, number, function = found.groups()
                path = re.sub(r"^.*(/site-packages/|/(?=omni_kv/))", "", path)
                if f"{os.sep}cache{os.sep}" in path:
                    path = "generated code"
                frames.append(f"{path}, line {number}, in {function}")
        return frames

    def unwrap(self) -> T:
        """Return the value.

        Raises:
            RuntimeError: if the function did not return; the message holds the child's output.
        """
        if self.status != "returned":
            raise RuntimeError(f"the child process {self.describe()}:\n{self.stderr_tail}")
        return self.value  # type: ignore[return-value]


def run_isolated(
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 180.0,
    env: Env | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    **kwargs: Any,
) -> Outcome[T]:
    """Call ``fn(*args, **kwargs)`` in a process that has compiled nothing of it; say what happened.

    Function, arguments and result travel by cloudpickle, so closures and functions of a notebook
    work; tensors that share a storage still share it on the other side.

    Args:
        fn: the function; its result must be picklable.
        args: its arguments.
        timeout: seconds until the child and all it started are killed.
        env: environment variables to set in the child, on top of ``CHILD_ENV``.
        cache_dir: compile-cache directory to use; by default a fresh one, removed afterwards.
        fresh: whether the child must be a fresh interpreter, for a program that changes something
            before it imports torch.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if ``timeout`` is not positive.
        pickle.PicklingError, TypeError: if the call cannot be sent to a child.
    """
    if timeout <= 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
    folder = Path(tempfile.mkdtemp(prefix="omni-kv-"))
    try:
        _dump((fn, args, kwargs), folder / "call")
        cache = Path(cache_dir) if cache_dir is not None else folder / "cache"
        (folder / "tmp").mkdir()
        share_precompiled_headers(folder / "tmp")
        usual = _environment(folder, cache)
        start = time.monotonic()
        code = _run(folder, usual, usual | dict(env or {}), timeout, fresh)
        seconds = time.monotonic() - start
        tail = _tail(folder / "output")
        return _outcome(folder, code, seconds, tail)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, usual: Env, env: Env, timeout: float, fresh: bool) -> int | None:
    """Run the call in a fork of the fork server, or where that is of no use in an interpreter.

    Returns:
        The exit code, negative for a signal; None if it was killed for its time.
    """
    call = (folder / "call").read_bytes()
    without = fresh or not (b"torch" in call or b"omni_kv" in call)
    server = None if without else server_for(env, usual)
    if server is not None:
        with contextlib.suppress(OSError):  # it is gone
            return server.run(folder, env, timeout)
    with (folder / "output").open("wb") as output:
        child = subprocess.Popen(
            command(folder, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder / "tmp",
            env=env,
            start_new_session=True,
        )
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also after a normal end: whatever the child started must not outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _environment(folder: Path, cache: Path) -> dict[str, str]:
    """The environment of a child whose files lie in ``folder``."""
    return {
        **os.environ,
        **CHILD_ENV,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }


def run_apart(fn: Callable[[], T], device: str = "cpu", **options: Any) -> Outcome[T]:
    """Call ``fn()`` where it may die: in a fork, or for a GPU, which a fork cannot use, in a child.

    Args:
        fn: a function without arguments; it and its result must be picklable.
        device: what it runs on.
        options: of a child, as ``run_isolated`` takes them.
    """
    return run_forked(fn) if device == "cpu" else run_isolated(fn, **options)


def run_forked(fn: Callable[[], T]) -> Outcome[T]:
    """Call ``fn()`` in a fork of this process, so that what was compiled here need not be again.

    Only for use inside a child of ``run_isolated`` or ``Fork``, which bounds its time, and only
    where torch runs on one thread (``torch.set_num_threads(1)``): a fork takes no other threads
    along.

    Args:
        fn: a function without arguments; its result must be picklable.
    """
    return Fork(fn, session=False).wait()


class Fork(Generic[T]):
    """A fork of this process that calls a function; several may run at a time.

    Args:
        fn: a function without arguments; its result must be picklable.
        session: whether the fork leads a session, so that what it starts ends with it.
    """

    def __init__(self, fn: Callable[[], T], session: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="omni-kv-fork-"))
        self.session = session
        self.start = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if session:
                    os.setsid()
                    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
                file = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(file, 1)
                os.dup2(file, 2)
                _keep_result(fn, self.folder)
                sys.stderr.flush()
            finally:
                os._exit(0)

    def wait(self, timeout: float | None = None) -> Outcome[T]:
        """Wait for the end of the fork, and say how it ended.

        Args:
            timeout: seconds since its start until it is killed.
        """
        try:
            status = self._status(timeout)
            timed_out = status is None
            if self.session:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            if status is None:
                _, status = os.waitpid(self.pid, 0)
            seconds = time.monotonic() - self.start
            code = None if timed_out else os.waitstatus_to_exitcode(status)
            return _outcome(self.folder, code, seconds, _tail(self.folder / "output"))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _status(self, timeout: float | None) -> int | None:
        """The exit status; None if there is none in time."""
        if timeout is None:
            return os.waitpid(self.pid, 0)[1]
        while time.monotonic() - self.start < timeout:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.01)
        return None


@contextlib.contextmanager
def graph_caches_off() -> Iterator[None]:
    """Let compilations in one process not find each other's graphs.

    The keys of the compile caches do not see how inputs share storage. Compiled *kernels* are still
    shared: their key is their source.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    graphs = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    aot = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with inductor_config.patch(graphs), functorch_config.patch(aot):
        yield


def run_all(calls: Sequence[Callable[[], T]], workers: int = 2) -> list[T]:
    """Run several calls that wait for children side by side and return their results in order.

    Args:
        calls: functions without arguments, such as ``partial(run_isolated, fn, x)``.
        workers: how many children may run at a time.
    """
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda call: call(), calls))


def run_dealt(
    fn: Callable[[list[A]], list[T]], items: Sequence[A], workers: int = 2, **options: Any
) -> list[T]:
    """Deal items out to child processes, each with its share, and return the results in order.

    Args:
        fn: takes a list of items, and returns one result for each.
        items: what to deal out.
        workers: how many children.
        options: passed on to ``run_isolated``: ``timeout`` (600 s by default), ``env``,
            ``cache_dir``.

    Raises:
        RuntimeError: if a child did not return; the message holds its output.
    """
    hands = [list(items[first::workers]) for first in range(workers)]
    options.setdefault("timeout", 600.0)  # for a whole hand, on a machine that may be busy
    children = run_all([partial(run_isolated, fn, hand, **options) for hand in hands if hand])
    done = [iter(child.unwrap()) for child in children]
    return [next(done[number % workers]) for number in range(len(items))]


def _outcome(folder: Path, code: int | None, seconds: float, tail: str) -> Outcome[Any]:
    def outcome(
        status: Status, value: Any = None, error: str | None = None, killed_by: str | None = None
    ) -> Outcome[Any]:
        return Outcome(status, value, error, killed_by, seconds, tail)

    if code is None:
        return outcome("timed out")
    if code < 0:
        return outcome("killed", killed_by=signal.Signals(-code).name)
    if (folder / "value").exists():
        return outcome("returned", value=_load(folder / "value"))
    if (folder / "error").exists():
        return outcome("raised", error=(folder / "error").read_text())
    return outcome("raised", error=f"SystemExit: the process ended itself with code {code}")


def _tail(output: Path) -> str:
    return output.read_bytes().decode(errors="replace")[-4000:] if output.exists() else ""


def _dump(thing: Any, path: Path) -> None:
    """Pickle with cloudpickle; torch.save keeps tensors that share a storage sharing it.

    What does not speak of torch is pickled without it: a process needs seconds to import torch.
    """
    import cloudpickle

    content = cloudpickle.dumps(thing)
    if b"torch" not in content:
        path.write_bytes(content)
        return
    import torch

    torch.save(thing, path, pickle_module=cloudpickle)


def _load(path: Path) -> Any:
    import pickle

    content = path.read_bytes()
    if not content.startswith(b"PK"):  # torch.save writes an archive
        return pickle.loads(content)
    import torch

    return torch.load(path, weights_only=False)


def _child(folder: Path, parent: int) -> None:
    """Run the call that lies in ``folder``: the child's side of ``run_isolated``."""
    import faulthandler

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before it could take this child along
        return
    faulthandler.enable()
    fn, args, kwargs = _load(folder / "call")
    _keep_result(lambda: fn(*args, **kwargs), folder)


def _keep_result(fn: Callable[[], Any], folder: Path) -> None:
    """Leave the result of ``fn()`` in the folder, or what it raised."""
    try:
        _dump(fn(), folder / "value.part")
        (folder / "value.part").rename(folder / "value")
    except BaseException as error:
        traceback.print_exc()
        (folder / "error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
