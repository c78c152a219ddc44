"""The demonstration behind `make demo`: four stages, each a few calls of the fenwick program.

  verify   every kernel against the float64 reference, and other people's golden files
  recall   multi-query associative recall: two linear models and their log-linear versions
  text     byte models of the Python sources of the virtual environment, and a continuation
  decode   state and time per token at 1K, 16K and 256K tokens of context, beside a KV cache

Everything lands in out/demo: logs, runs, results.json, plots and report.md. A stage that fails does
not stop the others; the exit status is then 1.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parents[1]
MODELS = ["mamba2", "log_linear_mamba2", "gated_deltanet", "log_linear_gated_deltanet"]

# Recall. Steps are for 8 minutes and scale with the time given.
RECALL = {
    "length": 32,
    "vocab": 64,
    "pairs": [2, 4, 8],
    "dim": 32,
    "layers": 2,
    "heads": 2,
    "head_dim": 32,
    "state": 8,
    "batch": 32,
    "steps": 1600,
    "learning_rates": [4e-3, 8e-3],
    "seeds": [0, 1],
}
# Text.
TEXT = {
    "dim": 128,
    "layers": 2,
    "heads": 4,
    "head_dim": 64,
    "state": 32,
    "length": 256,
    "batch": 8,
    "steps": 400,
    "lr": 3e-3,
    "max_bytes": 24_000_000,
}
CONTEXTS = [1024, 16384, 262144]


class StageFailed(Exception):
    pass


class Bar:
    """One line for a stage: redrawn on a terminal, a line for each change of the note elsewhere."""

    def __init__(self, label):
        self.label, self.begin, self.note = label, time.monotonic(), None

    def update(self, fraction, note):
        filled = int(24 * min(fraction, 1.0))
        seconds = int(time.monotonic() - self.begin)
        line = (
            f"{self.label:<8}{'━' * filled}{'─' * (24 - filled)} {int(100 * fraction):3d}%  "
            f"{seconds // 60}:{seconds % 60:02d}  {note}"
        )
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            print(f"\r{line[: width - 1]}\033[K", end="", file=sys.stderr, flush=True)
        elif note != self.note:
            print(line, file=sys.stderr, flush=True)
        self.note = note

    def finish(self, note):
        self.note = None
        self.update(1.0, note)
        if sys.stderr.isatty():
            print(file=sys.stderr)


class Demo:
    def __init__(self, out, program, device, minutes, quick):
        self.out, self.program, self.device, self.quick = out, program, device, quick
        self.scale = minutes / 8
        self.cores = len(os.sched_getaffinity(0))
        self.results = {
            "commands": {},
            "failed": [],
            "cores": self.cores,
            "device": device,
            "minutes": minutes,
            "quick": quick,
        }

    def start(self, words, log, threads):
        command = [str(self.program), *map(str, words), "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with open(log, "wb") as file, open(f"{log}.err", "wb") as errors:
            return subprocess.Popen(command, stdout=file, stderr=errors, env=environment)

    def call(self, words, log):
        """Runs to the end with all cores; returns the output."""
        status = self.start(words, log, self.cores).wait()
        if status != 0:
            raise StageFailed(
                f"`fenwick {words[0]}` exited {status}; see {log.relative_to(self.out)}"
            )
        return log.read_text(errors="replace")

    def call_many(self, bar, runs):
        """runs: (folder, words, steps). One thread each, as many at a time as there are cores."""
        waiting, running, done = list(runs), [], 0
        failed = []
        while waiting or running:
            while waiting and len(running) < self.cores:
                folder, words, steps = waiting.pop(0)
                folder.mkdir(parents=True, exist_ok=True)
                process = self.start([*words, "--out", folder, "--quiet"], folder / "log", 1)
                running.append((process, folder, steps))
            partial = 0.0
            for item in list(running):
                process, folder, steps = item
                status = process.poll()
                if status is None:
                    partial += last_step(folder) / steps
                    continue
                running.remove(item)
                done += 1
                if status != 0:
                    failed.append(f"{folder.relative_to(self.out)} exited {status}")
            bar.update((done + partial) / len(runs), f"{done} of {len(runs)} runs")
            time.sleep(0.2)
        if failed:
            raise StageFailed("; ".join(failed))

    def verify(self, bar):
        cases = 2 if self.quick else max(4, int(12 * self.scale))
        golden = sorted((ROOT / "tests/golden").glob("*.safetensors"))
        failed = []
        for name, note, words in (
            ("verify_golden", "golden files", ["verify", *golden]),
            ("verify", "kernels on random shapes", ["verify", "--cases", cases]),
        ):
            bar.update(0.0 if name == "verify_golden" else 0.2, note)
            log = self.out / f"{name}.txt"
            try:
                self.call(words, log)
            except StageFailed as error:
                failed.append(str(error))
            lines = log.read_text().splitlines()
            self.results[name] = lines[-1] if lines else "no result"
        if failed:
            raise StageFailed("; ".join(failed))
        return self.results["verify"]

    def recall(self, bar):
        r = dict(RECALL, steps=max(20, int(RECALL["steps"] * self.scale)))
        if self.quick:
            r |= {"steps": 20, "learning_rates": [4e-3], "seeds": [0]}
        runs = []
        cells = list(itertools.product(MODELS, r["learning_rates"], r["seeds"]))
        for model, rate, seed in cells:
            words = [
                "train",
                "mqar",
                "--device",
                self.device,
                "--model",
                model,
                "--lr",
                rate,
                "--seed",
                seed,
                "--steps",
                r["steps"],
                "--warmup",
                r["steps"] // 10,
                "--batch",
                r["batch"],
                "--length",
                r["length"],
                "--vocab",
                r["vocab"],
                "--pairs",
                ",".join(map(str, r["pairs"])),
                "--dim",
                r["dim"],
                "--layers",
                r["layers"],
                "--heads",
                r["heads"],
                "--head-dim",
                r["head_dim"],
                "--state",
                r["state"],
                "--levels",
                r["length"].bit_length(),
                "--eval-rows",
                64 if self.quick else 512,
            ]
            runs.append((self.out / "recall" / f"{model}_lr{rate:g}_seed{seed}", words, r["steps"]))
        self.call_many(bar, runs)
        table = []
        for (folder, _, _), (model, rate, seed) in zip(runs, cells, strict=True):
            records = read_metrics(folder)
            table.append(
                {
                    "model": model,
                    "lr": rate,
                    "seed": seed,
                    **records[-1]["eval"],
                    "curve": [(x["step"], x["loss"]) for x in records if "loss" in x],
                }
            )
        self.results["recall"] = {"settings": r, "runs": table}
        self.results["commands"]["recall"] = example(runs[0])
        return f"{len(runs)} runs"

    def text(self, bar):
        t = dict(TEXT, steps=max(20, int(TEXT["steps"] * self.scale)))
        if self.quick:
            t |= {"steps": 20, "max_bytes": 1_000_000}
        sources = sysconfig.get_paths()["purelib"]
        runs = []
        for model in ("mamba2", "log_linear_mamba2"):
            words = [
                "train",
                "text",
                "--device",
                self.device,
                "--model",
                model,
                "--data",
                sources,
                "--ext",
                ".py",
                "--max-bytes",
                t["max_bytes"],
                "--steps",
                t["steps"],
                "--lr",
                t["lr"],
                "--warmup",
                t["steps"] // 10,
                "--batch",
                t["batch"],
                "--length",
                t["length"],
                "--dim",
                t["dim"],
                "--layers",
                t["layers"],
                "--heads",
                t["heads"],
                "--head-dim",
                t["head_dim"],
                "--state",
                t["state"],
                "--eval-rows",
                16 if self.quick else 128,
            ]
            runs.append((self.out / "text" / model, words, t["steps"]))
        self.call_many(bar, runs)
        models = {}
        for folder, _, _ in runs:
            records = read_metrics(folder)
            models[folder.name] = {
                **records[-1]["eval"],
                "curve": [(x["step"], x["loss"]) for x in records if "loss" in x],
            }
        bar.update(0.95, "generating")
        continuation = self.call(
            [
                "generate",
                runs[1][0],
                "--device",
                self.device,
                "--prompt",
                "import numpy as np\n\n\ndef ",
                "--tokens",
                50 if self.quick else 500,
                "--temperature",
                0.7,
                "--seed",
                1,
            ],
            self.out / "continuation.txt",
        )
        self.results["text"] = {"settings": t, "models": models, "continuation": continuation}
        self.results["commands"]["text"] = example(runs[1]).replace(sources, ".venv/lib")
        best = min(models, key=lambda name: models[name]["bits_per_byte"])
        return f"{best}: {models[best]['bits_per_byte']:.3f} bits per byte"

    def decode(self, bar):
        contexts = CONTEXTS[:1] if self.quick else CONTEXTS
        lengths = ",".join(map(str, contexts))
        words = ["bench", "decode", "--json", "--device", self.device, "--contexts", lengths]
        bar.update(0.0, "decoding")
        self.results["decode"] = json.loads(self.call(words, self.out / "decode.json"))
        self.results["commands"]["decode"] = (
            f"build/bin/fenwick bench decode --device {self.device} --contexts {lengths}"
        )
        return f"{len(contexts)} lengths of context"

    def run(self):
        begin = time.monotonic()
        for name in ("verify", "recall", "text", "decode"):
            bar = Bar(name)
            try:
                bar.finish(getattr(self, name)(bar))
            except (StageFailed, OSError, ValueError, KeyError, IndexError) as error:
                bar.finish(f"FAILED: {error}")
                self.results["failed"].append(f"{name}: {error}")
        self.results["seconds"] = time.monotonic() - begin
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        report.write(self.results, self.out)
        return 1 if self.results["failed"] else 0


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_step(folder):
    path = folder / "metrics.jsonl"
    records = read_metrics(folder) if path.exists() else []
    return records[-1]["step"] if records else 0


def example(run):
    folder, words, _ = run
    return " ".join(["build/bin/fenwick", *map(str, words), "--out", f"out/{folder.name}"])


def device_of(program):
    """cuda where the program has the kernels and a GPU, else cpu."""
    info = subprocess.run([program, "info"], capture_output=True, text=True).stdout
    found = [line.split()[1] for line in info.splitlines() if line.startswith("cuda")]
    return "cuda" if found and found[0] != "none" else "cpu"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float(os.environ.get("FENWICK_DEMO_MINUTES", 8)),
        help="time to plan for on 2 cores (default: FENWICK_DEMO_MINUTES or 8)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where the program finds it)")
    parser.add_argument("--quick", action="store_true", help="a run of a minute that shows nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "out/demo")
    parser.add_argument("--program", type=Path, default=ROOT / "build/bin/fenwick")
    options = parser.parse_args()
    if not options.program.exists():
        print(f"demo: {options.program}: no such program; run `make build`", file=sys.stderr)
        return 2
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    device = options.device or device_of(options.program)
    demo = Demo(options.out, options.program, device, options.minutes, options.quick)
    try:
        status = demo.run()
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    print(
        f"{'failed' if status else 'done'} in {demo.results['seconds'] / 60:.1f} minutes: "
        f"{options.out / 'report.md'}",
        file=sys.stderr,
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
