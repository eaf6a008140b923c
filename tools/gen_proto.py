"""Regenerates src/neptrio/_proto from proto/, or checks that it is current.

Usage: python tools/gen_proto.py [--out DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "grpc_service.proto",
    "model_config.proto",
    "health.proto",
    "reflection_v1.proto",
    "reflection_v1alpha.proto",
)


def generate(out: Path) -> None:
    """Writes betterproto2 modules (grpclib service bases included) and the descriptor set."""
    bin_dir = Path(sys.executable).parent
    env = dict(os.environ, PATH=f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}")
    with tempfile.TemporaryDirectory() as tmp:
        target = Path(tmp) / "out"
        target.mkdir()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                "-I",
                str(ROOT / "proto"),
                f"--plugin=protoc-gen-python_betterproto2={bin_dir / 'protoc-gen-python_betterproto2'}",
                f"--python_betterproto2_out={target}",
                "--python_betterproto2_opt=client_generation=async",
                "--python_betterproto2_opt=server_generation=async",
                f"--descriptor_set_out={target / 'descriptors.binpb'}",
                "--include_imports",
                *SOURCES,
            ],
            check=True,
            env=env,
            cwd=target,  # away from pyproject.toml: the plugin formats with ruff's defaults
        )
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(target, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "neptrio" / "_proto")
    generate(parser.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
