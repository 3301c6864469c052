"""Write patches/fingerprints.json: the source of every target in every release, with its verdict.

    python tools/catalogue.py

Releases come from the package index (see tools/releases.py); nothing of them is imported. Verdicts are by release,
below: what a reader of the sources and the oracle found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import releases
from packaging.version import Version

from ds_gradfix.installed import Installed
from ds_gradfix.registry import Target, Verdict, discover, read_functions
from ds_gradfix.source import Function, fingerprint

FILE = Path(__file__).resolve().parent.parent / "patches" / "fingerprints.json"

DEFECTIVE_IN: dict[tuple[str, str], tuple[str | None, str | None]] = {
    ("sum-reduction", ""): (None, "0.19.5"),
    ("fp16-zero0-loss-scale", "backward"): ("0.18.3", None),
    ("fp16-zero0-loss-scale", "scale"): ("0.18.3", None),
    ("fused-expert-norm", ""): (None, "0.19.7"),
    ("fused-fp16-step", ""): ("0.17.6", "0.18.1"),
    ("nonfinite-norm", ""): (None, "0.19.7"),
    ("zero1-overflow-flag", ""): ("0.17.1", "0.17.6"),
    # ZeRO 0 averaged over shards, and experts over the ranks that hold them.
    ("sequence-parallel-mean", "_reduce_non_expert_gradients"): ("0.14.3", None),
    ("sequence-parallel-mean", "_reduce_expert_gradients"): ("0.14.1", None),
    # The source of 0.19.3 is that of 0.17.1; there is nothing to fold before 0.19.3, which the patch asks by `needs`.
    ("folded-expert-norm", ""): ("0.17.1", None),
    # 0.18.7 began to flatten on the accelerator; bf16 came to fp16's optimizer with 0.17.6,
    # whose gradients the step had never cleared for it.
    ("zero12-flatten-detach", ""): ("0.18.7", "0.18.9"),
    ("bf16-zero0-state", "_configure_fp16_optimizer"): ("0.17.6", "0.18.5"),
    ("bf16-zero0-state", "_take_model_step"): (None, "0.18.5"),
    ("bf16-optimizer-choice", ""): ("0.17.6", "0.18.4"),
    ("bf16-boundary-gradient", ""): ("0.18.3", "0.18.9"),
    ("zero12-expert-scale", ""): (None, "0.15.3"),
    ("zero12-expert-copy", ""): (None, "0.19.7"),
    ("zero2-accumulation", ""): ("0.17.6", "0.18.2"),
    ("zero2-offload-accumulation", ""): ("0.15.2", "0.18.9"),
    ("zero2-offload-boundary", "copy_grads_in_partition"): (None, "0.18.9"),
    # Before 0.15.2 and from 0.19.0 on it keeps what it is called for, but not only what is of this step.
    ("zero2-offload-boundary", "async_accumulate_grad_in_cpu_via_gpu"): (None, "0.18.9"),
    # The division moved from backward into its prologue with 0.16.5, and to the outputs of forward with 0.18.3.
    ("pipeline-accumulation-undivided", "backward"): ("0.16.0", "0.16.4"),
    ("pipeline-accumulation-undivided", "_backward_prologue"): ("0.16.5", "0.18.2"),
    ("no-sync-accumulation", "backward"): ("0.16.0", "0.16.4"),
    ("no-sync-accumulation", "_backward_prologue"): ("0.16.5", "0.18.2"),
    ("pipeline-accumulation-repeated", ""): ("0.18.3", "0.19.2"),
    ("accumulation-scale-ignored", ""): ("0.18.3", "0.18.3"),
    # From 0.18.4 on the hook knows a switch that turns it off.
    ("accumulation-loss-paths", "_backward_prologue_per_tensor"): ("0.18.3", "0.18.3"),
    ("accumulation-loss-paths", "backward"): ("0.18.3", "0.19.5"),
    ("sparse-rows-of-sum-zero", ""): (None, "0.19.7"),
    ("folded-input-gradient", ""): ("0.19.3", "0.19.7"),
}
"""The first and the last defective release, by patch, and by function where its targets differ; None is no end. A
patch that is not named here is needed by every release. Before the first a target does not have the defect yet."""


def verdict(patch_id: str, qualname: str, release: str) -> Verdict:
    function = qualname.rsplit(".", 1)[-1]
    bounds = DEFECTIVE_IN.get((patch_id, function), DEFECTIVE_IN.get((patch_id, ""), (None, None)))
    first, last = (Version(bound) if bound else None for bound in bounds)
    if first and Version(release) < first:
        return Verdict.ABSENT
    return Verdict.FIXED if last and Version(release) > last else Verdict.DEFECTIVE


def catalogue(folders: Mapping[str, Path]) -> list[dict[str, object]]:
    """One entry for each distinct source of each target: its releases and its verdict for each patch."""
    wanted: dict[Target, list[str]] = {}
    for patch in discover():
        for target in patch.targets:
            wanted.setdefault(target, []).append(patch.id)
    entries: dict[tuple[Target, str], dict[str, Any]] = {}
    for release, folder in folders.items():
        functions = read_functions(Installed(release, folder / "deepspeed", torch=None, ds_gradfix=None), wanted)
        for target, function in functions.items():
            if not isinstance(function, Function):
                continue
            mark = fingerprint(function.node)
            verdicts = {patch_id: verdict(patch_id, target.qualname, release).value for patch_id in wanted[target]}
            new = {"target": str(target), "fingerprint": mark, "releases": [], "verdicts": verdicts}
            entry = entries.setdefault((target, mark), new)
            if entry["verdicts"] != verdicts:
                raise SystemExit(f"{target} {mark}: one source, two verdicts, at {release}")
            entry["releases"].append(release)
    return [entry for _, entry in sorted(entries.items(), key=lambda item: item[0][0])]


if __name__ == "__main__":
    found = catalogue(releases.all_folders())
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} sources of {len({entry['target'] for entry in found})} targets")
