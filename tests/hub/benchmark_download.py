"""Wall time of a download, ours against the official client, on the same fake Hub: 40 files, 1 GiB, loopback.

    python -m tests.hub.benchmark_download [MiB] [rounds]

The fake Hub runs in a process of its own, each client in a fresh one. Ours hashes every byte; the official client checks sizes only, so its
time is also given with the hashing of what it has downloaded added (that is what it takes to know what we know).
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = 40

PRELUDE = """
import json, sys, time, types, hashlib, os
from pathlib import Path
package = types.ModuleType("transmuter_async")
package.__path__ = [str(Path.cwd() / "transmuter_async")]
sys.modules["transmuter_async"] = package
cache, endpoint = sys.argv[1:3]
"""

OURS = """
import anyio
from transmuter_async.hub import Environment, HubClient
async def main():
    async with HubClient(environment=Environment(cache=Path(cache), endpoint=endpoint)) as hub:
        began = time.perf_counter()
        await hub.download("org/m")
        print(json.dumps([time.perf_counter() - began]))
anyio.run(main, backend=sys.argv[3])
"""

OFFICIAL = """
os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
import huggingface_hub
began = time.perf_counter()
folder = huggingface_hub.snapshot_download("org/m", endpoint=endpoint, cache_dir=cache, token=False, max_workers=8)
downloaded = time.perf_counter() - began
for path in sorted(Path(folder).iterdir()):
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == path.resolve().name
print(json.dumps([downloaded, time.perf_counter() - began]))
"""

SERVER = """
import sys
from tests.hub.fake_hub import FakeHub, Lfs, Repeated
with FakeHub() as fake:
    size = int(sys.argv[1])
    fake.repo().commit({f"file{i:02}": Lfs(Repeated(size, b"%d" % i)) for i in range(int(sys.argv[2]))})
    fake.repo().info(fake.repo().branches["main"], blobs=True)  # hashes now, not while measuring
    print(fake.endpoint, flush=True)
    sys.stdin.read()
"""


def measure(code: str, endpoint: str, *options: str) -> list[float]:
    cache = tempfile.mkdtemp(prefix="transmuter-bench-")
    try:
        command = [sys.executable, "-c", PRELUDE + code, cache, endpoint, *options]
        return json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    finally:
        shutil.rmtree(cache)


def main() -> None:
    mebibytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    command = [sys.executable, "-c", SERVER, str((mebibytes << 20) // FILES), str(FILES)]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, code, option in (
            ("ours, asyncio", OURS, "asyncio"),
            ("ours, trio", OURS, "trio"),
            ("official", OFFICIAL, ""),
        ):
            measured = measure(code, endpoint, option)
            for label, seconds in zip((name, f"{name} + hashing"), measured, strict=False):
                times.setdefault(label, []).append(seconds)
    server.communicate("")
    for name, seconds in times.items():
        print(f"{name:24} median {statistics.median(seconds):6.2f} s   best {min(seconds):6.2f} s")


if __name__ == "__main__":
    main()
