"""Build steps of the wheel: the load balancer's hot path, and TLS in front of replicas, as native code.

All are optional: where one fails, the build warns and the wheel has the Python modules instead, which behave the same.
As pip hides the warning, a wheel whose modules could not be compiled has the reason in `lb/_not_compiled.txt`, which the load balancer
reports (`lb/agent/build_kind.py`).

- `lb/proxy/_fast_path.c` forwards plain chunks between two sockets and keeps them packed; a C compiler builds it in a second. Editable installs
  have it, too.
- `provisioners/remote/host_agent/_tls_relay.c` passes on what comes to a replica by TLS. It is no module of Python: the machines that it is
  sent to have other ones. Editable installs have it, too.
- mypyc compiles the modules of NATIVE. They then take about 0.7 times the CPU per request (`benchmarks/router/README.md`). The
  build needs some two and a half minutes of CPU, which all cores share, so editable installs do without; SKYSERVE_NATIVE=0
  skips it for wheels as well, and SKYSERVE_NATIVE=1 makes a failure an error.

    python hatch_build.py FOLDER      compile NATIVE of this checkout into FOLDER, for benchmarks
    python hatch_build.py --check     only check that mypyc accepts the modules, which takes some seconds
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script

    class BuildHookInterface:  # type: ignore[no-redef]
        pass


ROOT = Path(__file__).resolve().parent
SWITCH = "SKYSERVE_NATIVE"
GROUP = "skyserve_lb"
OPTIMIZATION = "1"  # -O2 takes half as much again to build
MODULE_C = "__native_"  # begins the names of the C files of modules; others are mypyc's own library
FILES = 16
NATIVE = (
    "policies/routing",
    "lb/agent/limits_file.py",
    "lb/core",
    "lb/http",
    "lb/stream",
    "lb/proxy",
    "lb/observe/access_log.py",
    "lb/observe/counters.py",
    "lb/observe/explain.py",
    "lb/observe/key_usage.py",
    "lb/observe/label_slots.py",
)
INTERPRETED = {
    "__init__.py",
    "target_list.py",  # its class is a list, which a native class cannot be
    "tls_acceptor.py",  # coroutines that are cancelled, of which OpenSSL has nearly all the CPU
    "tls_transport.py",  # the same
}
NOTE = "lb/_not_compiled.txt"
LONGEST_NOTE = 300
ADVICE = "its compilation failed (install a C compiler and the headers of Python, and install again): "
DEPENDENCIES = ["mypy>=2.4", "setuptools>=77"]


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        """Returns what `initialize` imports."""
        return DEPENDENCIES if self.target_name == "wheel" and _wanted() != "0" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = self._fast_path(build_data) | self._tls_relay(build_data)
        if version != "editable" and _wanted() != "0":
            built = self._native(build_data) or built
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := build_data.get("_native_folder"):
            shutil.rmtree(folder, ignore_errors=True)

    def _fast_path(self, build_data: dict[str, Any]) -> bool:
        source = "lb/proxy/_fast_path.c"
        helper = source.replace(".c", str(sysconfig.get_config_var("EXT_SUFFIX")))
        return _library(self, build_data, source, helper, f"-I{sysconfig.get_path('include')}")

    def _tls_relay(self, build_data: dict[str, Any]) -> bool:
        source = "provisioners/remote/host_agent/_tls_relay.c"
        target = source.replace(".c", ".so")
        return sys.platform == "linux" and _library(self, build_data, source, target, "-s", "-ldl")

    def _native(self, build_data: dict[str, Any]) -> bool:
        folder = Path(tempfile.mkdtemp(prefix="skyserve-native-"))
        build_data["_native_folder"] = str(folder)
        done = self._compiled(folder)
        if done.returncode:
            sentence = (
                f"the load balancer is not compiled (it is slower, and works): {done.stdout.strip()[-500:]}"
            )
            if _wanted() == "1":
                shutil.rmtree(folder, ignore_errors=True)  # `finalize` is not called after an error
                raise RuntimeError(sentence)
            self.app.display_warning(sentence)
            note = folder / Path(NOTE).name  # not in the checkout, where it would outlast this build
            note.write_text(f"{(ADVICE + reason_of(done.stdout))[:LONGEST_NOTE]}\n", encoding="utf-8")
            build_data["force_include"][str(note)] = NOTE
            return False
        for file in folder.rglob("*.so"):
            build_data["force_include"][str(file)] = str(file.relative_to(folder))
        return True

    def _compiled(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Compile into `folder`, in a process of its own: mypyc ends the process on an error."""
        command = [sys.executable, str(ROOT / "hatch_build.py"), str(folder)]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )


def _library(hook: Any, build_data: dict[str, Any], source: str, target: str, *options: str) -> bool:
    """Compile one C file of the checkout beside itself; the hook warns where that fails."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-O2", "-shared", "-fPIC", "-pthread", source, "-o", target, *options]
    try:
        subprocess.run(command, cwd=hook.root, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        hook.app.display_warning(f"{source} is not built: {said.decode(errors='replace').strip()[-300:]}")
        return False
    build_data["artifacts"].append(target)
    return True


def _wanted() -> str:
    return os.environ.get(SWITCH, "")


def reason_of(output: str) -> str:
    """Return the last message of a compiler that failed, as one line: its last error if it names one, else its last line."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if " error: " in line]
    return (errors or lines or ["the compiler gave no reason"])[-1][:LONGEST_NOTE]


def modules() -> Iterator[str]:
    """Yields the paths of the modules to compile, relative to the checkout."""
    for place in NATIVE:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            if file.name not in INTERPRETED:
                yield str(file.relative_to(ROOT))


def compile_into(folder: Path | None) -> None:
    """Compile the modules into `folder`, as extension modules beside a shared library; None: check them only.

    Ends the process with a message if mypyc does not accept a module.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # In a process of its own, whose 350 MB are free again before the C compilers run.
        with ProcessPoolExecutor(1) as mypyc:
            extensions = mypyc.submit(_translated, scratch).result()
        if folder is not None:
            _build(extensions, folder.resolve(), Path(scratch))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    print(
        f"native modules: {cpu_s:.0f} s of CPU, {max(one.ru_maxrss for one in used) >> 10} MB in the largest process"
    )


def _translated(scratch: str) -> list[Any]:
    """Translate the modules into C files; return the extension modules to build of them."""
    from mypyc.build import mypycify

    os.chdir(ROOT)
    options = [
        "--config-file=",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--no-warn-unused-ignores",
        f"--cache-dir={scratch}",
    ]
    return mypycify(
        [*options, *modules()],
        opt_level=OPTIMIZATION,
        debug_level="0",
        target_dir=str(Path(scratch) / "c"),
        group_name=GROUP,
        multi_file=True,  # one C file for all takes one compiler a gigabyte, and several times as long
    )


def _build(extensions: list[Any], folder: Path, scratch: Path) -> None:
    """Run the C compiler on all files, one for each core at a time, and link the extension modules."""
    from setuptools import Distribution

    command = Distribution({"name": GROUP, "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder), str(scratch / "o")
    command.parallel = cores = len(os.sched_getaffinity(0))
    compile_and_link = command.build_extension

    def compile_first(extension: Any) -> None:
        def compiled(source: str) -> list[str]:
            return command.compiler.compile(
                [source],
                output_dir=command.build_temp,
                include_dirs=extension.include_dirs,
                # Files call each other's functions directly, as one file would, and export only what Python imports.
                extra_postargs=[*extension.extra_compile_args, "-fvisibility=hidden"],
            )

        with ThreadPoolExecutor(cores) as pool:
            files = pool.map(compiled, _merged(extension.sources, scratch / "c"))
        extension.extra_objects = [file for each in files for file in each]
        extension.sources = []
        compile_and_link(extension)

    command.build_extension = compile_first
    command.ensure_finalized()
    command.run()


def _merged(sources: list[str], folder: Path) -> list[str]:
    """Return fewer files with the same content: each file includes the same long headers. The largest is the first."""
    modules = sorted((one for one in sources if MODULE_C in one), key=_size)
    count = min(FILES, len(modules))
    groups: list[list[str]] = [[] for _ in range(count)]
    for source in reversed(modules):
        min(groups, key=lambda group: sum(map(_size, group))).append(source)
    made = []
    for number, group in enumerate(groups):
        path = folder / f"merged_{number}.c"
        path.write_text("".join(f'#include "{Path(source).resolve()}"\n' for source in group))
        made.append(str(path))
    return [*made, *(one for one in sources if MODULE_C not in one)]


def _size(path: str) -> int:
    return Path(path).stat().st_size


if __name__ == "__main__":
    compile_into(None if sys.argv[1:] == ["--check"] else Path(sys.argv[1]))
