"""What an engine would hold: the memory plan of a model, BF16, W12 and FP8 side by side.

In: a directory or hub id with a `config.json`, perhaps a drafter's, and a memory size. Out: the plan as a
dict of plain numbers (the schema of `specpilot plan --json`) or as an aligned table. All arithmetic is the
engine's own; nothing is loaded, and of a hub model only its config files are fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specpilot_rs import _core, _cuda
from specpilot_rs.hub import CONFIG_FILES, model_directory
from specpilot_rs.options import EngineOptions

_PARTS = {
    "linear_layers": "linear layers",
    "embedding": "embedding",
    "lm_head": "LM head",
    "vectors": "norms and other vectors",
    "q_views": "8-bit views for Q passes",
    "lm_head_copy": "INT8 copy of the head",
    "drafter_weights": "drafter",
    "gdn_states": "recurrent states",
    "gdn_log": "recurrent log",
    "gdn_conv": "convolution inputs",
    "activations": "activations",
    "pass_tail": "uncommitted rows",
    "logits": "logits",
    "drafter_workspace": "drafter's workspace",
    "gpu_runtime": "kernels and their scratch",
}
"""Labels of the parts, in the order of the table."""


def plan_memory(
    model: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    memory: str | None = None,
    device: str = "cpu",
    options: EngineOptions | None = None,
) -> dict[str, Any]:
    """Plans a deployment without loading it.

    Args:
        model: Directory or hub id of the target.
        drafter: Directory or hub id of the drafter; plain decoding if omitted.
        memory: The device's memory, such as "80GB" (10^9) or "80GiB"; what it has available if omitted.
        device: "cpu", "cuda:N" or "auto"; decides how weights are laid out.
        options: Limits, speculation and the share of the memory that the engine may take.

    Returns:
        Sizes in bytes by purpose and the KV pool that they leave, for each weight format; `shortfall` says
        what to change if none that is served fits the memory, and is None otherwise.

    Raises:
        SpecPilotError: A config or an option cannot be used.
    """
    model_dir = model_directory(model, files=CONFIG_FILES)
    drafter_dir = None if drafter is None else model_directory(drafter, files=CONFIG_FILES)
    if device == "auto":
        # With its compiler loaded a GPU counts as one here, as it does when an engine opens.
        _cuda.find_gpu(device)
    plan = _core.plan(
        model=str(model_dir),
        drafter=None if drafter_dir is None else str(drafter_dir),
        options=options or EngineOptions(),
        memory=memory,
        device=device,
    )
    return {
        "model": str(model_dir),
        "drafter": None if drafter_dir is None else str(drafter_dir),
        "memory_source": "available" if memory is None else "given",
        **plan,
    }


def human_bytes(num_bytes: int) -> str:
    """Returns a size with three or four digits and a decimal unit."""
    size = float(num_bytes)
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.95 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{num_bytes} B" if unit == "B" else f"{size:.{2 if size < 10 else 1}f} {unit}"


def render(plan: dict[str, Any]) -> str:
    """Returns a plan as a table for people."""
    forms = [plan["formats"][name] for name in ("bf16", "w12", "fp8")]

    def row(label: str, values: Iterable[Any], shown: Callable[[Any], str]) -> tuple[str, ...]:
        return (label, *map(shown, values))

    rows: list[tuple[str, ...]] = [("", "BF16", "W12", "FP8")]
    for part, label in _PARTS.items():
        sizes = [form["bytes"][part] for form in forms]
        if any(sizes):
            rows.append(row(label, sizes, human_bytes))
    rows.append(row("held in all", (form["fixed_bytes"] for form in forms), human_bytes))
    rows.append(row("KV pool", (form["pool_bytes"] for form in forms), human_bytes))
    if plan["kv_page_bytes"] + plan["drafter_page_bytes"]:
        rows.append(row("  pages", (form["pool_pages"] for form in forms), "{:,}".format))
    if plan["num_windowed_layers"]:
        rows.append(row("  pages of windows", (form["pool_window_pages"] for form in forms), "{:,}".format))
    rows.append(row("  tokens", (form["pool_tokens"] for form in forms), "{:,}".format))
    rows.append(row("  largest context", (form["largest_context"] for form in forms), "{:,}".format))
    label = f"  requests of {plan['max_model_len']:,}"
    rows.append(row(label, (form["full_requests"] for form in forms), str))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [f"{cells[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True))]
        )
        for cells in rows
    ]
    table.insert(1, "-" * len(table[0]))
    return "\n".join([*_head(plan), "", *table, "", *_notes(plan)])


def _head(plan: dict[str, Any]) -> Iterator[str]:
    yield f"{plan['architecture']}, {plan['num_parameters'] / 1e9:.3f} B parameters: {plan['model']}"
    if plan["drafter"] is not None:
        size = plan["num_drafter_parameters"] / 1e9
        head = f", draft head: {plan['draft_head']}" if plan["draft_head"] else ""
        yield f"{plan['method']} drafter, {size:.3f} B parameters{head}: {plan['drafter']}"
    yield (
        f"{plan['device']}: {human_bytes(plan['memory_bytes'])} {plan['memory_source']}, "
        f"of which {plan['gpu_memory_utilization']:g} = {human_bytes(plan['budget_bytes'])} for the engine; "
        f"{plan['dtype']} activations and KV"
    )
    drafter = f" and {plan['drafter_bytes_per_token']:,} B in the drafter" if plan["drafter"] else ""
    window = f", in a window {plan['window_bytes_per_token']:,} B more" if plan["num_windowed_layers"] else ""
    yield (
        f"{plan['max_num_seqs']} requests at once, {plan['max_step_rows']} rows a pass; "
        f"a token of context takes {plan['kv_bytes_per_token']:,} B{window}{drafter}"
    )


def _notes(plan: dict[str, Any]) -> Iterator[str]:
    bf16, w12 = plan["formats"]["bf16"], plan["formats"]["w12"]
    formats = {name.upper(): form for name, form in plan["formats"].items()}
    fitting = [name for name, form in formats.items() if form["pool_pages"]]
    if plan["shortfall"] is not None:
        yield f"Nothing fits: none of {', '.join(formats)} leaves room for a request."
    elif plan["pool_ratio"] is not None:
        yield f"The KV pool is {plan['pool_ratio']:.2f} times as large with W12."
    else:
        missing = human_bytes(bf16["missing_bytes"])
        verb = "fits" if len(fitting) == 1 else "fit"
        yield f"Only {' and '.join(fitting)} {verb}; BF16 lacks {missing} for one full request."
    for name, form in formats.items():
        if form["missing_bytes"] and form["pool_pages"]:
            yield (
                f"{name}: one request of {plan['max_model_len']:,} tokens lacks "
                f"{human_bytes(form['missing_bytes'])}; "
                f"set max_model_len to {form['largest_context']:,} or less."
            )
    bits = f"{w12['linear_bits_per_weight']:.3f} bits a weight in {w12['num_w12_matrices']} matrices"
    if not w12["num_w12_matrices"]:
        yield "W12 pays for no matrix of this model: all stay BF16."
    elif w12["is_estimate"]:
        yield (
            f"In memory W12 is estimated at {bits}: 12 bits, what decoding needs beside them, and "
            f"{plan['assumed_escape_rate']:g} escapes a weight; convert the model for exact sizes."
        )
    else:
        yield f"In memory W12 takes {bits}, by the checkpoint's headers; `specpilot inspect` shows its files."
    fp8 = plan["formats"]["fp8"]
    if fp8["is_estimate"]:
        yield (
            f"FP8 stands for a checkpoint with block scales in {fp8['num_fp8_matrices']} matrices, as "
            "publishers make them; this one is not read as FP8 unless it holds such."
        )
    if plan["num_windowed_layers"]:
        num_tokens = plan["page_tokens"] * plan["window_pages"]
        size = human_bytes(plan["window_pages"] * plan["window_page_bytes"])
        yield (
            f"{plan['num_windowed_layers']} layers with a window keep {num_tokens:,} tokens "
            f"of a request at most: {size}."
        )
    yield "Not counted: the driver's own memory, a kernel's scratch, and a matrix a thread while loading."
