import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from omni_kv.sandbox import server
from omni_kv.sandbox.process import run_all, run_dealt, run_isolated

pytestmark = pytest.mark.compiles


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """Children leave nothing behind; the folder of the fork server goes when it ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert [p for p in tmp_path.iterdir() if not p.name.startswith("omni-kv-server-")] == []


def test_a_result_comes_back():
    outcome = run_isolated(lambda a, b: a + b, 2, b=3)
    assert (outcome.status, outcome.value) == ("returned", 5)
    assert outcome.unwrap() == 5


def test_tensors_that_share_a_storage_still_share_it_in_the_child():
    kv = torch.arange(10.0)

    def shares(a, b):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(), b.storage_offset()

    assert run_isolated(shares, kv[:5], kv[5:]).unwrap() == (True, 5)


def test_an_exception_comes_back_by_name():
    def fails():
        raise IndexError("slot 7")

    outcome = run_isolated(fails)
    assert (outcome.status, outcome.error) == ("raised", "IndexError: slot 7")
    assert "in fails" in outcome.stderr_tail
    with pytest.raises(RuntimeError, match="slot 7"):
        outcome.unwrap()


def test_a_signal_comes_back_by_name():
    outcome = run_isolated(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert (outcome.status, outcome.signal) == ("killed", "SIGSEGV")
    assert outcome.describe() == "killed by SIGSEGV"
    assert outcome.frames()[0].endswith("in <lambda>")


def test_an_exit_is_no_result():
    outcome = run_isolated(os._exit, 3)
    assert (outcome.status, outcome.error) == (
        "raised",
        "SystemExit: the process ended itself with code 3",
    )


def test_what_does_not_end_is_ended_with_all_it_started(tmp_path):
    pids = tmp_path.parent / f"{tmp_path.name}-pids"

    def hang():
        import subprocess as sp

        child = sp.Popen(["sleep", "60"])
        Path(pids).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)

    start = time.monotonic()
    assert run_isolated(hang, timeout=6).status == "timed out"
    assert time.monotonic() - start < 20
    for pid in map(int, pids.read_text().split()):
        _gone(pid)


def _gone(pid):
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # dead; its parent, the init process, has yet to collect it
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


def test_a_child_dies_with_its_parent(tmp_path):
    marker = tmp_path.parent / f"{tmp_path.name}-child"
    program = (
        "from omni_kv.sandbox.process import run_isolated\n"
        "import os, time, pathlib\n"
        "def child():\n"
        f"    pathlib.Path({str(marker)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "run_isolated(child)\n"
    )
    elsewhere = tmp_path.parent / f"{tmp_path.name}-tmp"
    elsewhere.mkdir()
    env = {**os.environ, "TMPDIR": str(elsewhere), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=env)
    for _ in range(300):
        if marker.exists() and marker.read_text():
            break
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    _gone(int(marker.read_text()))


def test_each_child_has_a_compile_cache_of_its_own():
    caches = [run_isolated(lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"]).unwrap() for _ in "ab"]
    assert caches[0] != caches[1]
    assert not any(map(os.path.exists, caches))


def test_a_cache_can_be_shared_on_purpose(tmp_path):
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    got = run_isolated(lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"], cache_dir=cache)
    assert got.unwrap() == str(cache)


def test_precompiled_headers_are_shared_and_compiled_graphs_are_not():
    def places():
        from torch._inductor import codecache
        from torch._inductor.runtime.runtime_utils import cache_dir

        return os.path.realpath(codecache._HEADER_DIR), cache_dir()

    (headers, graphs), (same_headers, other_graphs) = (
        run_isolated(places).unwrap() for _ in range(2)
    )
    assert headers == same_headers
    assert graphs != other_graphs


def test_no_core_file_is_written():
    def core_limit():
        import resource

        return resource.getrlimit(resource.RLIMIT_CORE)

    assert run_isolated(core_limit).unwrap() == (0, 0)


def test_forks_report_like_children():
    def forks():
        import signal as sig

        from omni_kv.sandbox.process import run_forked

        def fails():
            print("last words")
            raise IndexError("slot 7")

        dies = run_forked(lambda: os.kill(os.getpid(), sig.SIGSEGV))
        return [run_forked(lambda: 5), run_forked(fails), dies]

    fine, failed, died = run_isolated(forks).unwrap()
    assert fine.value == 5
    assert failed.error == "IndexError: slot 7"
    assert "in fails" in failed.stderr_tail
    assert died.describe() == "killed by SIGSEGV"
    assert died.frames()[0].endswith("in <lambda>")


def test_many_keep_their_order():
    outcomes = run_all([partial(run_isolated, lambda i=i: i) for i in range(3)])
    assert [o.value for o in outcomes] == [0, 1, 2]


def test_what_is_dealt_out_comes_back_in_order_and_a_death_is_told():
    assert run_dealt(lambda hand: [(os.getpid(), x) for x in hand], []) == []
    pids, items = zip(
        *run_dealt(lambda hand: [(os.getpid(), x) for x in hand], range(5)), strict=True
    )
    assert items == (0, 1, 2, 3, 4)
    assert len(set(pids)) == 2
    with pytest.raises(RuntimeError, match="killed by SIGSEGV"):
        run_dealt(lambda hand: os.kill(os.getpid(), signal.SIGSEGV), [1])


def test_a_time_limit_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        run_isolated(lambda: None, timeout=0)


def test_a_fork_of_the_server_is_what_a_fresh_interpreter_would_be():
    """An environment that torch may have read at import asks for a fresh interpreter."""

    def state():
        import sys

        from torch._dynamo.convert_frame import FRAME_COUNTER
        from torch._dynamo.utils import counters
        from torch._inductor import codecache, config, metrics

        main = sys.modules["__main__"].__spec__.name
        own = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FRESH")
        env = {name: value for name, value in os.environ.items() if name not in own}
        return (
            main,
            codecache._precompile_header.cache_info().currsize > 0,
            [
                env,
                list(dict.fromkeys(path for path in sys.path if path != os.getcwd())),
                os.path.basename(os.getcwd()),
                os.getsid(0) == os.getpid(),
                signal.getsignal(signal.SIGCHLD),
                (torch.get_num_threads(), torch.is_grad_enabled()),
                dict(counters),
                FRAME_COUNTER,
                (metrics.generated_kernel_count, metrics.ir_nodes_pre_fusion),
                config.save_config_portable(),
            ],
        )

    *_, (forked, compiled, of_forked) = (
        run_isolated(state).unwrap() for _ in range(server.COLD + 1)
    )
    fresh, compiled_fresh, of_fresh = run_isolated(state, env={"FRESH": "1"}).unwrap()
    assert (forked, fresh) == ("omni_kv.sandbox.server", "omni_kv.sandbox.process")
    assert (compiled, compiled_fresh) == (True, False)
    assert of_forked == of_fresh


def test_each_child_draws_other_random_numbers_as_interpreters_do():
    drawn = [run_isolated(torch.initial_seed).unwrap() for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_where_the_environment_changes_there_is_another_server(monkeypatch):
    def main_and_value():
        import sys

        return sys.modules["__main__"].__spec__.name, torch and os.environ.get("CHANGED")

    first = run_isolated(main_and_value).unwrap()
    monkeypatch.setenv("CHANGED", "1")
    second = run_isolated(main_and_value).unwrap()
    assert (first, second) == ((first[0], None), (first[0], "1"))
    assert first[0] == "omni_kv.sandbox.server"


def test_what_one_child_does_to_itself_the_next_does_not_see():
    def spoils():
        from torch._inductor import config

        os.environ["SPOILED"] = "1"
        config.cpp.threads = 7
        torch.set_default_dtype(torch.float64)

    def seen():
        from torch._inductor import config

        return os.environ.get("SPOILED"), config.cpp.threads, torch.ones(1).dtype

    before = run_isolated(seen).unwrap()
    run_isolated(spoils).unwrap()
    assert run_isolated(seen).unwrap() == before


def test_the_server_ends_with_its_parent_and_leaves_no_folder(tmp_path):
    program = (
        "from omni_kv.sandbox import server\n"
        "from omni_kv.sandbox.process import run_isolated\n"
        "import os, torch\n"
        "run_isolated(torch.ones, 1)\n"
        "print(server._servers[False].process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    elsewhere = tmp_path.parent / f"{tmp_path.name}-tmp"
    elsewhere.mkdir()
    env = {**os.environ, "TMPDIR": str(elsewhere), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
    _gone(int(done.stdout))
    assert not list(elsewhere.glob("omni-kv-server-*"))


@pytest.mark.parametrize("device", ["nvidia0", "nvidiactl", "kfd"])
def test_what_may_see_a_gpu_has_a_server_of_its_own_and_with_an_amd_gpu_none(
    tmp_path_factory, monkeypatch, device
):
    devices = tmp_path_factory.mktemp("dev")
    (devices / device).touch()
    monkeypatch.setattr(server, "_DEVICES", devices)
    monkeypatch.setattr(server, "_servers", {})
    started = []

    class Started:
        def __init__(self, env):
            started.append(env)

        def fits(self, env):
            return True

    monkeypatch.setattr(server, "ForkServer", Started)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for env in ({}, hidden, {"CUDA_VISIBLE_DEVICES": "0"}, hidden):
        server.server_for(env, {})
    assert started == {"nvidia0": [{}, hidden], "nvidiactl": [{}], "kfd": []}[device]


@pytest.mark.parametrize("untouched", [True, False])
def test_where_a_fork_could_not_use_the_gpu_it_becomes_a_fresh_interpreter(
    tmp_path_factory, untouched
):
    devices = tmp_path_factory.mktemp("dev")
    (devices / "nvidia0").touch()
    program = f"""
import os, pathlib, socket, sys, torch
from omni_kv.sandbox import process, server
server._DEVICES = pathlib.Path({str(devices)!r})
server._IMPORTED, server._cuda_untouched = ("torch",), lambda: {untouched}
def main_and_answer():
    return sys.modules["__main__"].__spec__, torch.tensor([42]).item()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
env = process._environment(pathlib.Path("/tmp"), pathlib.Path("/tmp"))
parent = os.getpid()
if os.fork() == 0:
    os.environ.clear(); os.environ.update(env)
    server.serve(theirs, ours, parent)
    os._exit(0)
server._servers[True] = server.ForkServer(env, ours)
spec, answer = process.run_isolated(main_and_answer).unwrap()
print(spec.name if spec else "a fork of this program", answer)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    name = "a fork of this program" if untouched else "omni_kv.sandbox.process"
    assert done.stdout.splitlines() == [f"{name} 42"], done.stderr


def test_a_child_has_forks_of_the_same_server_for_children():
    def main_and_supervisors_parent():
        pid = os.getppid()
        stat = Path(f"/proc/{pid}/stat").read_text()
        assert torch  # which is reason enough for a fork
        return sys.modules["__main__"].__spec__.name, int(stat.rpartition(")")[2].split()[1])

    def asks():
        return main_and_supervisors_parent(), run_isolated(main_and_supervisors_parent).unwrap()

    run_isolated(torch.ones, 1)
    child, grandchild = run_isolated(asks).unwrap()
    assert child == grandchild == ("omni_kv.sandbox.server", server._servers[False].process.pid)
