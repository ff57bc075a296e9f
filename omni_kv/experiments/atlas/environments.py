"""An environment for each release: made with venv and pip, reused where it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_kv.evidence.records import PACKAGE_PARENT
from omni_kv.experiments.atlas.execute import Job

#: Lies in environments that this command made: no other is ever removed.
_MARK = "made-by-omni-kv-atlas"
_LIGHT = ("click", "pydantic", "cloudpickle", "tqdm", "numpy")


def run_releases(
    releases: Sequence[str], job: Job, typed: list[str], envs: Path, keep: bool, remove: bool
) -> dict[str, str]:
    """Run the job with each release; the releases that were skipped, each with the reason.

    Args:
        releases: versions of torch.
        job: what to run.
        typed: options that decide what is recorded.
        envs: folder of the environments.
        keep: let environments of several releases lie there.
        remove: remove an environment that was made here when its release is done.
    """
    envs.mkdir(parents=True, exist_ok=True)
    skipped = {}
    for release in releases:
        folder = envs / f"torch-{release}"
        try:
            if not (folder / "bin" / "python").exists():
                if not keep:
                    _remove_made(envs)
                _make(folder, release)
            _run_in(folder, release, job, typed, envs)
        except subprocess.CalledProcessError as error:
            last = (error.stderr or "").strip().splitlines()[-1:]
            what = "the run" if "omni_kv.cli" in error.cmd else "the installation"
            skipped[release] = f"{what} ended with code {error.returncode} {''.join(last)}".strip()
        finally:
            if remove and (folder / _MARK).exists():
                shutil.rmtree(folder)
    return skipped


def _make(folder: Path, release: str) -> None:
    """A fresh environment with torch; nothing is left behind if that fails."""
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (folder / _MARK).touch()
        _pip(folder, f"torch=={release}", "setuptools", "numpy")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_made(envs: Path) -> None:
    for mark in envs.glob(f"torch-*/{_MARK}"):
        shutil.rmtree(mark.parent)


def _pip(folder: Path, *arguments: str) -> None:
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def _run_in(folder: Path, release: str, job: Job, typed: list[str], envs: Path) -> None:
    """Run the cells with the environment's interpreter; this package comes by PYTHONPATH."""
    python = str(folder / "bin" / "python")
    paths = [str(PACKAGE_PARENT)]
    probe = subprocess.run(
        [python, "-c", f"import {', '.join(_LIGHT)}"], stderr=subprocess.DEVNULL, check=False
    )
    if probe.returncode:  # kept outside the environment, which may be somebody else's
        light = envs / "light" / folder.name
        if not light.exists():
            _pip(folder, "--target", str(light), *_LIGHT)
        paths.append(str(light))
    options = ["--out", str(job.out.resolve()), "--executor", job.executor]
    options += ["--workers", str(job.workers), *typed]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMNI_KV_RECORD_COMMAND": " ".join(["omni-kv", "atlas", "--torch", release, *typed]),
    }
    command = [python, "-m", "omni_kv.cli", "atlas", "--here", *options]
    subprocess.run(command, check=True, env=environment)
