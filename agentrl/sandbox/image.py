"""The default Docker image, built from this machine's own Python and tools: no registry, nothing is downloaded.

python -m agentrl.sandbox.image [--name NAME] [--no-pytest]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from agentrl.errors import AgentRLError, SandboxUnavailable

DEFAULT_IMAGE = "agentrl-sandbox"
_TOOLS = (
    "sh", "bash", "[", "awk", "basename", "cat", "chmod", "cmp", "comm", "cp", "cut", "date", "diff", "dirname", "du",
    "echo", "env", "expr", "false", "find", "fold", "grep", "gzip", "head", "id", "join", "ln", "ls", "md5sum",
    "mkdir", "mkfifo", "mktemp", "mv", "nl", "nproc", "od", "paste", "pr", "printf", "pwd", "readlink", "realpath",
    "rm", "rmdir", "sed", "seq", "sha256sum", "shuf", "sleep", "sort", "split", "stat", "tac", "tail", "tar", "tee",
    "test", "timeout", "touch", "tr", "true", "tsort", "uname", "uniq", "wc", "which", "xargs", "yes",
)  # fmt: skip
_NEEDED = ("sh", "bash", "cat", "env", "find", "head", "readlink", "rm", "tar", "timeout")
_NO_STDLIB = shutil.ignore_patterns(
    "__pycache__", "*.a", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*",
    "site-packages", "dist-packages", "_tkinter*.so", "_test*.so", "_ctypes_test*.so", "xxlimited*.so",
)  # fmt: skip
_FACTS = """
import json, site, sys, sysconfig
name = "python%d.%d" % sys.version_info[:2]
paths = {"stdlib": sysconfig.get_path("stdlib"), "prefix": sys.prefix, "executable": sys.executable}
print(json.dumps({"name": name, "sites": site.getsitepackages(), **paths}))
"""
_FILES = {
    "etc/passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/work:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    "etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_CHANGES = [
    "ENV PATH=/usr/local/bin:/usr/bin",
    "WORKDIR /work",
    "USER 1000:1000",
    'CMD ["bash"]',
    'LABEL org.opencontainers.image.title="agentrl sandbox"',
]


def build_image(name: str = DEFAULT_IMAGE, *, with_pytest: bool = True) -> str:
    """The image is in the engine under that name, and its id is returned; an older one of the name loses it.

    About 95 MB: bash, the common tools, Python's standard library, and pytest where this environment has it.

    Raises:
        SandboxUnavailable: no engine answers, or this machine's programs cannot run in a Linux container.
    """
    from agentrl.sandbox.docker_engine import connect

    client = connect()
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-image-") as folder:
            root, archive = Path(folder, "root"), Path(folder, "root.tar")
            make_rootfs(root, with_pytest=with_pytest)
            with archive.open("wb") as file:
                write_tar(root, file)
            answer = client.import_image_from_file(str(archive), repository=name, changes=_CHANGES)
        lines = [json.loads(line) for line in str(answer).splitlines() if line.strip()]
        problem = next((line["error"] for line in lines if "error" in line), None)
        if problem:
            raise SandboxUnavailable(f"The Docker engine refused the image {name}: {problem}")
        return str(lines[-1]["status"])
    finally:
        client.close()


def make_rootfs(root: Path, *, with_pytest: bool = True) -> None:
    """A folder that can be the root of a sandbox: this machine's Python, shell and tools with the libraries they need.

    Raises:
        SandboxUnavailable: not Linux with glibc, or one of the few tools that a sandbox cannot do without is absent.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise SandboxUnavailable(
            "The default image is made of this machine's own programs, which needs Linux with glibc. Use an image that "
            "has sh, tar and python3 instead: docker pull python:3.12-slim, and SandboxSpec(image='python:3.12-slim')."
        )
    for folder in ("usr/bin", "usr/lib", "etc", "tmp", "work", "proc", "dev", "sys", "root"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "sbin"):
        (root / link).symlink_to("usr/bin")
    for link in ("lib", "lib32", "lib64", "libx32"):
        if os.path.isdir(f"/{link}"):
            (root / "usr" / link).mkdir(exist_ok=True)
            (root / link).symlink_to(f"usr/{link}")
    for path, text in _FILES.items():
        (root / path).write_text(text)
    programs = [*_copy_tools(root), *_copy_python(root, with_pytest)]
    _copy_libraries(root, programs)


def write_tar(root: Path, file: IO[bytes]) -> None:
    """The folder as a tar whose files all belong to root and can be read, but not changed, by everybody."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 1000 if info.name == "work" else 0
        info.uname = info.gname = ""
        info.mtime = 0
        info.mode = 0o1777 if info.name == "tmp" else 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    with tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, arcname=path.name, filter=plain)


def _copy_tools(root: Path) -> list[Path]:
    copied = []
    for name in _TOOLS:
        found = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
        if found is None:
            if name in _NEEDED:
                raise SandboxUnavailable(
                    f"The default image needs the program {name}, which this machine does not have."
                )
            continue
        shutil.copy(os.path.realpath(found), root / "usr/bin" / name)
        copied.append(root / "usr/bin" / name)
    return copied


def _copy_python(root: Path, with_pytest: bool) -> list[Path]:
    """The interpreter below a virtual environment is /usr/bin/python3 of the image. Returned: what needs libraries."""
    base = getattr(sys, "_base_executable", sys.executable)
    facts = json.loads(subprocess.run([base, "-I", "-c", _FACTS], capture_output=True, check=True, text=True).stdout)
    name, library = facts["name"], root / "usr/lib" / facts["name"]
    shutil.copytree(facts["stdlib"], library, ignore=_NO_STDLIB, symlinks=True)
    for link in [path for path in library.rglob("*") if path.is_symlink() and not path.exists()]:
        link.unlink()  # Debian links sitecustomize.py to /etc
    binary = root / "usr/bin" / name
    shutil.copy(os.path.realpath(facts["executable"]), binary)
    for link in ("python3", "python"):
        (root / "usr/bin" / link).symlink_to(name)
    site = next((s for s in facts["sites"] if Path(s).parent == Path(facts["prefix"], "lib", name)), "site-packages")
    packages = library / Path(site).name
    packages.mkdir()
    if with_pytest:
        _copy_distributions(packages, "pytest")
    # Never compared with the sources: the image is read-only, so what is stale could not be written anew.
    compile_all = [base, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*compile_all, "-s", str(root), "-p", "/", str(library)], stdout=subprocess.DEVNULL, check=False)
    originals = sorted(Path(facts["stdlib"], "lib-dynload").glob("*.so"))
    return [Path(facts["executable"]), *(path for path in originals if (library / "lib-dynload" / path.name).exists())]


def _copy_distributions(target: Path, name: str) -> None:
    """A pure Python package and what it needs lie in the folder, as far as this environment has them."""
    done: set[str] = set()
    waiting = [name]
    while waiting:
        try:
            distribution = importlib.metadata.distribution(waiting.pop())
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement for other versions or systems
        if distribution.name in done:
            continue
        done.add(distribution.name)
        for file in distribution.files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target / file)
        for line in distribution.requires or ():
            if "extra ==" not in line:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0])


def _copy_libraries(root: Path, programs: Sequence[Path]) -> None:
    """Every shared library that the programs load, in its folder if that is the system's, and the loader's index."""
    folders = set()
    for source in sorted(set(_libraries(programs))):
        system = source.startswith(("/lib", "/usr/lib"))
        path = source if system else f"/usr/lib/more/{os.path.basename(source)}"
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(os.path.realpath(source), target)
        folders.add(os.path.dirname(path))
    (root / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in sorted(folders)))
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if ldconfig is None:
        raise SandboxUnavailable("The default image needs ldconfig, which this machine does not have.")
    subprocess.run([ldconfig, "-r", str(root)], check=True, capture_output=True)


def _libraries(programs: Sequence[Path]) -> Iterator[str]:
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        # "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)" or "/lib64/ld-linux-x86-64.so.2 (0x...)"
        found = re.match(r"\s+(?:\S+ => )?(/\S+) \(0x", line)
        if found:
            yield found[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the image and says so; 1 and one sentence where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.sandbox.image", description=build_image.__doc__)
    parser.add_argument("--name", default=DEFAULT_IMAGE)
    parser.add_argument("--no-pytest", action="store_true", help="leave pytest out")
    options = parser.parse_args(arguments)
    try:
        image = build_image(options.name, with_pytest=not options.no_pytest)
    except AgentRLError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.name} is {image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
