"""A fork server, as in ``multiprocessing``: children that need not import torch again.

Most of a child's processor time goes into importing torch and Inductor, and into what Inductor
does once a process. The server is a process that has imported them and, once several children were
asked for, compiled one function of no interest; each child is a fork of it, with an environment, a
folder and a session of its own. A child asks the same server for children of its own.
The standard library's server would run the caller's ``__main__`` again and keeps one environment
for all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import getpass
import importlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omni_kv.sandbox.compiler import compile_once

#: What the server imports; a name that a torch release does not have is passed over.
_IMPORTED = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "cloudpickle")
#: What may differ between server and child: read when it is needed, not when torch is imported,
#: or of no account where there is no GPU.
_MAY_DIFFER = {
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TMPDIR",
    "PYTHONPATH",
    "PWD",
    "CUDA_VISIBLE_DEVICES",
}
_OURS = ("OMNI_KV_", "PYTEST_")
#: So many children do by themselves what Inductor does once a process: for fewer, or for such as
#: compile nothing, it would be done in vain.
COLD = 2
_DEVICES = Path("/dev")
_CODE = struct.Struct("i")
_END = b"end"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


class ForkServer:
    """A server for children whose environment is like that of its first one; ends with its parent.

    Args:
        env: the environment of the first child.
        requests: a connection to a server that runs for another process; by default one is started.
    """

    def __init__(self, env: Mapping[str, str], requests: socket.socket | None = None) -> None:
        self.env = _read_at_import(env)
        self.owner = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        if requests is not None:
            self.requests = requests
            return
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            connections = (theirs.fileno(), self.requests.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, connections), str(self.owner)],
                pass_fds=connections,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**env, "TMPDIR": tempfile.gettempdir()},
                start_new_session=True,
            )
        atexit.register(self.close)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a child with this environment may be a fork of the server."""
        runs = self.process is None or self.process.poll() is None
        return runs and self.env == _read_at_import(env)

    def run(self, folder: Path, env: Mapping[str, str], timeout: float) -> int | None:
        """Run ``call(folder, parent)`` of ``serve`` in a fork; end it, and all that it started.

        Args:
            folder: where the child finds its call and leaves its result.
            env: the environment of the child.
            timeout: seconds until it is killed.

        Returns:
            The exit code, negative for a signal; None if it was killed for its time.

        Raises:
            OSError: if the server is gone.
        """
        request = json.dumps({"env": dict(env), "path": sys.path})
        (folder / "request").write_text(request)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self.requests, [os.fsencode(folder)], [theirs.fileno()])
            ours.settimeout(timeout)
            try:
                return _received(ours)
            except TimeoutError:
                ours.shutdown(socket.SHUT_WR)  # which the other side takes for "kill it"
                ours.settimeout(None)
                _received(ours)
                return None

    def close(self) -> None:
        """Let the server end, if it runs for this process; forks of it go on."""
        atexit.unregister(self.close)
        with self.requests:
            if self.process is None or self.owner != os.getpid():
                return
            with contextlib.suppress(OSError):  # it is gone
                self.requests.send(_END)
        self.process.wait()


_lock = threading.Lock()
#: The servers that this process may ask, by whether they may see a GPU.
_servers: dict[bool, ForkServer] = {}


def server_for(env: Mapping[str, str], usual: Mapping[str, str]) -> ForkServer | None:
    """The server of this process, if a child with this environment may be a fork of it.

    With an AMD GPU there is none: importing torch touches it, and a fork could not use it.

    Args:
        env: the child's environment.
        usual: that of most children. A server that does not fit is replaced for such a one only.
    """
    if (_DEVICES / "kfd").exists():
        return None
    gpu = _may_see_gpu(env)
    with _lock:
        server = _servers.get(gpu)
        if server is not None and server.fits(env):
            return server
        if _read_at_import(env) != _read_at_import(usual):
            return None
        if server is not None:
            server.close()
        _servers[gpu] = ForkServer(env)
        return _servers[gpu]


def _may_see_gpu(env: Mapping[str, str]) -> bool:
    return any(_DEVICES.glob("nvidia[0-9]*")) and env.get("CUDA_VISIBLE_DEVICES") != ""


def _cuda_untouched() -> bool:
    """Whether nothing has initialised CUDA's driver here: a fork could not use it then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # there is none
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return status == _NOT_INITIALIZED


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that torch may have looked at when it was imported."""
    return {k: v for k, v in env.items() if k not in _MAY_DIFFER and not k.startswith(_OURS)}


def _received(connection: socket.socket) -> int:
    content = connection.recv(_CODE.size)
    if not content:
        raise ConnectionError("the fork server ended")
    code: int = _CODE.unpack(content)[0]
    return code


def share_precompiled_headers(tmp: Path) -> None:
    """Let Inductor find its precompiled C++ headers, which all children share.

    Inductor keeps them beside its *default* cache, in the folder for temporary files, which for a
    child goes away with it; building them anew takes half of a child's time. They hold headers of
    torch and nothing of any graph, are named by their contents, and Inductor locks them. There is
    no setting for the place, hence a link; where a release looks elsewhere, a child is slower.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        headers = home / "omni-kv" / "precompiled_headers"
        headers.mkdir(parents=True, exist_ok=True)
        default_cache = tmp / f"torchinductor_{getpass.getuser()}"
        default_cache.mkdir()
        (default_cache / "precompiled_headers").symlink_to(headers)
    except (OSError, KeyError, RuntimeError):
        # A home that cannot be written, or a user without an entry: the child is slower.
        return


@dataclass(frozen=True)
class _Server:
    """What a child takes from its server.

    Attributes:
        env: the server's environment.
        asks: a connection over which to ask it for children.
        fork_sees_gpu: whether a fork of it may use a GPU.
    """

    env: dict[str, str]
    asks: socket.socket
    fork_sees_gpu: bool


def serve(requests: socket.socket, asks: socket.socket, parent: int) -> None:
    """The server's side: import torch, then fork for every request until the parent is gone."""
    env = dict(os.environ)
    gpu = _may_see_gpu(env)
    asks.set_inheritable(False)  # forks have it, and the programs that they start do not
    with (
        tempfile.TemporaryDirectory(prefix="omni-kv-server-") as folder,
        contextlib.suppress(ProcessLookupError),  # the parent is gone already
    ):
        parent_ends = os.pidfd_open(parent)
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        share_precompiled_headers(Path(folder))
        # Importing Inductor asks whether there is a GPU. So asked, torch does not touch it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for name in _IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        server = _Server(env, asks, not gpu or _cuda_untouched())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
        for served in itertools.count():
            asked = select.select([requests.fileno(), parent_ends], [], [])[0]
            if requests.fileno() not in asked:
                return
            content, (*connections,), _, _ = socket.recv_fds(requests, 4096, 1)
            if not connections:
                return
            if served == COLD and not gpu:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the C++ compiler is waited for
                compile_once()
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            if os.fork() == 0:
                with contextlib.suppress(BaseException):
                    requests.close()
                    _supervise(
                        socket.socket(fileno=connections[0]), Path(os.fsdecode(content)), server
                    )
                os._exit(0)
            os.close(connections[0])


def _supervise(connection: socket.socket, folder: Path, server: _Server) -> None:
    """Fork the child, wait until it or the caller ends, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            connection.close()
            _enter(folder)
            if _may_see_gpu(os.environ) and not server.fork_sees_gpu:
                os.execv(sys.executable, command(folder, parent))
            # By its name: this module is the main one here, and the child imports it anew.
            own = importlib.import_module("omni_kv.sandbox.server")
            own._servers[_may_see_gpu(server.env)] = own.ForkServer(server.env, server.asks)
            importlib.import_module("omni_kv.sandbox.process")._child(folder, parent)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    server.asks.close()
    select.select([os.pidfd_open(pid), connection.fileno()], [], [])
    with contextlib.suppress(ProcessLookupError):  # also after a normal end: what it started
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # it may not lead its session yet
    connection.sendall(_CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def command(folder: Path, parent: int) -> list[str]:
    """The command of a child that is a fresh interpreter.

    Args:
        folder: where it finds its call and leaves its result.
        parent: the process that it ends with.
    """
    return [sys.executable, "-m", "omni_kv.sandbox.process", str(folder), str(parent)]


def _enter(folder: Path) -> None:
    """Make this fork what a fresh interpreter started in the folder would be."""
    os.setsid()
    request = json.loads((folder / "request").read_text())
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = request["path"]
    tempfile.tempdir = None
    os.chdir(folder / "tmp")
    if "torch" in sys.modules:  # which takes another seed each time that it is imported
        sys.modules["torch"].default_generator.seed()


if __name__ == "__main__":
    theirs, ours, parent = map(int, sys.argv[1:])
    serve(socket.socket(fileno=theirs), socket.socket(fileno=ours), parent)
