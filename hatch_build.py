"""Builds the load balancer's optional helper in C (`lb/proxy/_fast_path.c`) where there is a compiler; without one the package is
the same, less that file, and `lb.proxy.fast_path` does without."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        source = Path(self.root) / "lb" / "proxy" / "_fast_path.c"
        helper = source.with_name(f"_fast_path{sysconfig.get_config_var('EXT_SUFFIX')}")
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
        flags = ["-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        try:
            subprocess.run(
                [*compiler, *flags, str(source), "-o", str(helper)], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            self.app.display_warning(
                f"lb/proxy/_fast_path.c is not built: {said.decode(errors='replace').strip()[-300:]}"
            )
            return
        build_data["artifacts"].append(f"lb/proxy/{helper.name}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
