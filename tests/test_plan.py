"""The memory plan: published models from their configs alone, against sizes worked out by hand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM, ConfigError, DrafterError, OptionError
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.options import EngineOptions
from specpilot_rs.plan_report import human_bytes, plan_memory, render

from tests.test_cli import error_of, specpilot

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
QWEN_27B = CONFIGS / "qwen3.8-27b"
QWEN_4B = CONFIGS / "qwen3.5-4b"
LLAMA_8B = CONFIGS / "llama-3.1-8b"
GEMMA_12B = CONFIGS / "gemma-4-12b"
MUSE_30B = CONFIGS / "muse-glimmer-30b"
DFLASH2_27B = CONFIGS / "qwen3.8-27b-dflash2"
MIB = 2**20
FORMATS = ("bf16", "w12", "fp8")
FORMAT_KEYS = {
    "bytes",
    "fixed_bytes",
    "weight_bytes",
    "linear_bits_per_weight",
    "num_w12_matrices",
    "num_fp8_matrices",
    "largest_context",
    "is_estimate",
    "pool_pages",
    "pool_window_pages",
    "pool_tokens",
    "pool_bytes",
    "full_requests",
    "missing_bytes",
}
PLAN_KEYS = {
    "model",
    "drafter",
    "method",
    "architecture",
    "num_parameters",
    "num_drafter_parameters",
    "max_position_embeddings",
    "device",
    "dtype",
    "memory_source",
    "memory_bytes",
    "gpu_memory_utilization",
    "budget_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_step_rows",
    "tree_nodes",
    "head",
    "draft_head",
    "num_windowed_layers",
    "page_tokens",
    "kv_page_bytes",
    "window_page_bytes",
    "window_pages",
    "drafter_page_bytes",
    "kv_bytes_per_token",
    "window_bytes_per_token",
    "drafter_bytes_per_token",
    "gdn_slot_bytes",
    "assumed_escape_rate",
    "formats",
    "pool_ratio",
    "shortfall",
}


def plan(model: Path, memory: str | None = "80GB", device: str = "cuda", **given: Any) -> dict[str, Any]:
    settings = {name: given.pop(name) for name in ("drafter",) if name in given}
    return plan_memory(model, memory=memory, device=device, options=EngineOptions(**given), **settings)


@pytest.mark.parametrize(
    ("model", "billions", "kv_bytes", "window_bytes", "state_mib", "history_mib"),
    [
        (QWEN_27B, 26.896, 131_072, 0, 144, 5.6),
        (QWEN_4B, 4.206, 65_536, 0, 48, 2.25),
        (LLAMA_8B, 8.030, 262_144, 0, 0, 0),
        # Of mixed layers: 8 full ones of one head of 512, 40 sliding ones of 8 of 256; 13 and 39 of 2 of 128.
        (GEMMA_12B, 11.907, 32_768, 655_360, 0, 0),
        (MUSE_30B, 27.855, 26_624, 79_872, 0, 0),
    ],
)
def test_published_sizes(
    model: Path, billions: float, kv_bytes: int, window_bytes: int, state_mib: int, history_mib: float
):
    planned = plan(model, max_num_seqs=2)
    assert planned["num_parameters"] / 1e9 == pytest.approx(billions, abs=5e-4)
    assert planned["kv_bytes_per_token"] == kv_bytes
    assert planned["kv_page_bytes"] == 64 * kv_bytes
    assert planned["window_bytes_per_token"] == window_bytes
    assert planned["window_page_bytes"] == 64 * window_bytes
    # A slot keeps a ring of three states, and the convolution's three past inputs
    # with the current one.
    slot = planned["gdn_slot_bytes"]
    assert slot["states"] == 3 * state_mib * MIB
    assert slot["conv"] * 3 / 4 / MIB == pytest.approx(history_mib, abs=0.05)
    for name in FORMATS:
        held = planned["formats"][name]["bytes"]
        assert held["gdn_states"] == 2 * slot["states"]
        assert held["gdn_log"] == 2 * slot["log"]
    on_host = plan(model, "400GB", device="cpu")
    assert on_host["dtype"] == "float32"
    assert on_host["kv_bytes_per_token"] == kv_bytes
    assert on_host["gdn_slot_bytes"] == slot


def test_the_parts_add_up():
    planned = plan(QWEN_27B, drafter=DFLASH2_27B, max_num_seqs=3)
    assert planned["budget_bytes"] == 72_000_000_000
    for name in FORMATS:
        form = planned["formats"][name]
        assert sum(form["bytes"].values()) == form["fixed_bytes"]
        page = planned["kv_page_bytes"] + planned["drafter_page_bytes"]
        assert form["pool_bytes"] == form["pool_pages"] * page
        left = planned["budget_bytes"] - form["fixed_bytes"] - form["pool_bytes"]
        assert 0 <= left < page
        assert form["pool_tokens"] == 64 * form["pool_pages"]
        assert form["full_requests"] == form["pool_tokens"] // planned["max_model_len"]
    bf16, w12, fp8 = (planned["formats"][name]["bytes"] for name in FORMATS)
    # A code a weight, and for every slice of 16 channels and 192 to 320 columns a note of 80 bytes.
    assert fp8["linear_layers"] / bf16["linear_layers"] == pytest.approx(0.5 * (1 + 80 / 16 / 280), abs=1e-3)
    table = 248_320 * 5_120
    # On a GPU a matrix also says where its escapes begin: nowhere, in BF16.
    assert bf16["embedding"] == bf16["lm_head"] == w12["lm_head"] == 2 * table + 4
    # Codes, and four numbers of fp32 a channel.
    assert bf16["lm_head_copy"] == table + 248_320 * 16
    assert w12["linear_layers"] / bf16["linear_layers"] == pytest.approx(0.7596, abs=2e-4)
    assert planned["formats"]["w12"]["is_estimate"]
    assert not planned["formats"]["bf16"]["is_estimate"]
    assert {part for part in bf16 if bf16[part] != w12[part]} == {"linear_layers"}


@pytest.mark.parametrize("model", [QWEN_27B, QWEN_4B, LLAMA_8B, GEMMA_12B, MUSE_30B], ids=lambda p: p.name)
def test_contexts_and_requests_on_cards(model: Path, report: Any):
    for gigabytes in (80, 96, 141):
        planned = plan(model, f"{gigabytes}GB", max_num_seqs=1)
        for name in FORMATS:
            form = planned["formats"][name]
            # Of one request alone the pool is.
            longest = min(form["pool_tokens"], planned["max_position_embeddings"])
            assert form["largest_context"] == longest
            assert (form["largest_context"] > 0) == (form["fixed_bytes"] < planned["budget_bytes"])
        busy = plan(model, f"{gigabytes}GB", max_num_seqs=8, max_model_len=8192)["formats"]
        report(
            f"  {model.name}, {gigabytes} GB: largest context "
            + ", ".join(f"{name} {planned['formats'][name]['largest_context']:,}" for name in FORMATS)
            + "; requests of 8,192 "
            + ", ".join(f"{name} {busy[name]['full_requests']}" for name in FORMATS)
        )


def test_more_weights_saved_is_more_pool():
    sizes = [plan(QWEN_27B, f"{gigabytes}GB", max_num_seqs=1) for gigabytes in (68, 72, 80, 96, 141, 400)]
    ratios = [planned["pool_ratio"] for planned in sizes]
    assert ratios == sorted(ratios, reverse=True)
    assert all(ratio > 1 for ratio in ratios)
    for settings in ({"max_num_seqs": 4}, {"drafter": DFLASH2_27B}, {"gpu_memory_utilization": 0.85}):
        assert plan(QWEN_27B, **{"max_num_seqs": 1, **settings})["pool_ratio"] > sizes[2]["pool_ratio"]
    assert plan(QWEN_27B, "60GB", max_num_seqs=1)["pool_ratio"] is None


def test_the_papers_figure_on_80_gb(report):
    """W12 doubles the KV pool of Qwen3.8-27B on 80 GB: true of one request with drafter and INT8 head."""
    ratios = {}
    for drafter in (None, DFLASH2_27B):
        for max_num_seqs in (1, 8):
            planned = {
                (screened, share): plan(
                    QWEN_27B,
                    drafter=drafter,
                    head="screened" if screened else "dense",
                    max_num_seqs=max_num_seqs,
                    gpu_memory_utilization=share,
                )
                for screened in (False, True)
                for share in (0.9, 0.95)
            }
            for (screened, share), one in planned.items():
                tokens = [one["formats"][name]["pool_tokens"] for name in FORMATS[:2]]
                ratios[drafter is not None, max_num_seqs, screened, share] = one["pool_ratio"]
                report(
                    f"Qwen3.8-27B, 80 GB x {share}, {max_num_seqs} request(s), "
                    f"{'with' if drafter else 'no'} DFlash2, {'INT8 copy' if screened else 'dense head'}: "
                    f"KV tokens {tokens[0]:,} BF16, {tokens[1]:,} W12: {one['pool_ratio']:.2f}x"
                )
            stock = planned[False, 0.9]["formats"]["bf16"]["pool_tokens"]
            ours = planned[True, 0.9]["formats"]["w12"]["pool_tokens"]
            report(f"  BF16 with a dense head against W12 with its INT8 copy: {ours / stock:.2f}x")
    card = plan(QWEN_27B, "81559MiB", drafter=DFLASH2_27B, max_num_seqs=1)
    report(f"  a card that reports 81,559 MiB, one request, DFlash2, INT8 copy: {card['pool_ratio']:.2f}x")
    assert ratios[True, 1, True, 0.9] == pytest.approx(2.09, abs=0.01)
    assert min(ratios.values()) == pytest.approx(1.59, abs=0.01)
    assert max(ratios.values()) == pytest.approx(3.17, abs=0.01)


def test_the_schema_is_stable():
    for model, drafter in ((TARGET_DIR, DFLASH2_DIR), (LLAMA_8B, None)):
        planned = plan(model, "40GB", drafter=drafter)
        assert set(planned) == PLAN_KEYS
        assert set(planned["formats"]) == set(FORMATS)
        assert all(set(form) == FORMAT_KEYS for form in planned["formats"].values())
        assert json.loads(json.dumps(planned)) == planned


def test_an_engine_holds_what_was_planned():
    options = {"max_model_len": 1000, "max_num_seqs": 3}
    llm = LLM.demo(**options, num_threads=1)
    planned = plan(TARGET_DIR, None, "cpu", drafter=DFLASH2_DIR, **options)
    described = llm.describe()
    form = planned["formats"]["bf16"]
    assert form["weight_bytes"] == described["weight_bytes"]
    assert planned["num_parameters"] == described["num_parameters"]
    for name in ("kv_page_bytes", "max_model_len", "max_num_seqs", "max_step_rows", "tree_nodes", "method"):
        assert planned[name] == described[name], name
    assert described["num_kv_pages"] == 3 * 16 <= form["pool_pages"]
    longest = llm.score([5] * 1000)
    assert longest.logits.shape[0] == 1000


def test_a_share_of_the_memory_that_is_too_small():
    with pytest.raises(OptionError, match=r"B are missing; .*raise gpu_memory_utilization to 0"):
        LLM.demo(gpu_memory_utilization=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"memory": "80XB"}, OptionError, r"such as 80GB, 74\.5GiB.*got \"80XB\""),
        ({"memory": "-80GB"}, OptionError, "positive size"),
        ({"memory": "0"}, OptionError, "positive size"),
        ({"memory": "80"}, OptionError, "with its unit, such as 80GB"),
        ({"memory": None}, OptionError, "memory of device `cuda`"),
        ({"device": "tpu"}, OptionError, "auto, cpu, cuda"),
        ({"max_model_len": 10**6}, OptionError, "max_position_embeddings 262144"),
        ({"drafter": DFLASH2_DIR}, DrafterError, "does not fit target"),
    ],
)
def test_mistakes_are_explained(given: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        plan(QWEN_27B, **given)


def smallest_form(planned: dict[str, Any]) -> dict[str, Any]:
    smallest: dict[str, Any] = min(planned["formats"].values(), key=lambda form: form["fixed_bytes"])
    return smallest


@pytest.mark.parametrize(
    ("spare_slots", "max_num_seqs", "says"),
    [
        (None, 8, "GB are missing; a larger memory or a smaller"),
        (-40, 64, r"lower max_num_seqs to (\d+) or less"),
        (-63, 64, "max_num_seqs and raise gpu_memory_util"),
    ],
)
def test_a_plan_that_does_not_fit_is_still_shown(spare_slots: int | None, max_num_seqs: int, says: str):
    """A memory that lacks some requests' share of the smallest format; or nearly all of it."""
    roomy = plan(QWEN_27B, "400GB", max_num_seqs=max_num_seqs)
    one_less = plan(QWEN_27B, "400GB", max_num_seqs=max_num_seqs - 1)
    fixed = smallest_form(roomy)["fixed_bytes"]
    slot = fixed - smallest_form(one_less)["fixed_bytes"]
    budget = 9e9 if spare_slots is None else fixed + spare_slots * slot
    # The last case lacks what a share of all the memory would give.
    memory = f"{int(budget / (0.96 if spare_slots == -63 else 0.9))}B"
    planned = plan(QWEN_27B, memory, max_num_seqs=max_num_seqs)
    found = re.search(says, planned["shortfall"])
    assert found, planned["shortfall"]
    if found.groups():
        most = int(found[1])
        assert max_num_seqs + spare_slots - 2 <= most <= max_num_seqs + spare_slots
        assert plan(QWEN_27B, memory, max_num_seqs=most)["shortfall"] is None
        assert plan(QWEN_27B, memory, max_num_seqs=most + 1)["shortfall"] is not None
    requests = ("--max-num-seqs", str(max_num_seqs))
    result = specpilot("plan", QWEN_27B, "--memory", memory, "--device", "cuda", *requests)
    assert result.returncode == 2
    assert result.stdout.decode() == render(planned) + "\n"
    assert "linear layers" in render(planned)
    assert "Nothing fits: none of BF16, W12, FP8 leaves room" in render(planned)
    assert result.stderr.decode() == f"error: {planned['shortfall']}\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp8_counts_as_fitting(device: str):
    """A memory that holds the FP8 plan and no other."""
    fixed = {
        name: form["fixed_bytes"]
        for name, form in plan(QWEN_27B, "400GB", device, max_num_seqs=1)["formats"].items()
    }
    memory = f"{int((fixed['fp8'] + fixed['w12']) / 2 / 0.9)}B"
    planned = plan(QWEN_27B, memory, device, max_num_seqs=1)
    forms = planned["formats"]
    assert forms["fp8"]["pool_pages"] > 0 == forms["w12"]["pool_pages"]
    assert planned["shortfall"] is None
    assert "Only FP8 fits; BF16 lacks" in render(planned)


@pytest.mark.parametrize(
    ("device", "max_num_batched_tokens", "pages"),
    [
        # 1,023 positions before a row, and the rows of a prompt that come before its last 64.
        ("cuda", None, 16),
        ("cpu", None, 19),
        ("cuda", 64, 16),
        ("cuda", 65, 17),
        ("cuda", 2048, 47),
    ],
)
def test_layers_with_windows_keep_them(device: str, max_num_batched_tokens: int | None, pages: int):
    planned = plan(GEMMA_12B, device=device, max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens)
    assert planned["num_windowed_layers"] == 40
    assert planned["window_pages"] == pages
    text = render(planned)
    megabytes = pages * 64 * 655_360 / 1e6
    size = f"{megabytes:.1f} MB" if megabytes < 999 else f"{megabytes / 1000:.2f} GB"
    assert f"40 layers with a window keep {64 * pages:,} tokens of a request at most: {size}." in text
    assert "a token of context takes 32,768 B, in a window 655,360 B more" in text
    for form in planned["formats"].values():
        assert form["pool_window_pages"] == pages
        assert form["pool_bytes"] == 64 * (form["pool_pages"] * 32_768 + pages * 655_360)
    assert "window" not in render(plan(QWEN_27B, max_num_seqs=1))


def test_the_command_takes_the_rows_of_a_pass():
    """As `LLM` does: windows grow with them, by the same plan, and what is no size is refused."""
    arguments = ("plan", GEMMA_12B, "--memory", "80GB", "--device", "cuda", "--max-num-seqs", "1")
    for rows, pages in ((None, 16), (65, 17), (2048, 47)):
        flag = () if rows is None else ("--max-num-batched-tokens", str(rows))
        planned = json.loads(specpilot(*arguments, *flag, "--json").stdout)
        assert planned["window_pages"] == pages
        assert planned == plan(GEMMA_12B, max_num_seqs=1, max_num_batched_tokens=rows)
    for rows in ("0", "8193"):
        message = error_of(*arguments, "--max-num-batched-tokens", rows)
        assert f"`max_num_batched_tokens` should be an integer in 1..=8192 or None, got {rows}" in message


def test_windows_alone_take_no_context(tmp_path: Path):
    """Where all layers slide a request keeps its windows, and its context is the model's own."""
    config = json.loads((GEMMA_12B / "config.json").read_bytes())
    config["text_config"]["layer_types"] = ["sliding_attention"] * 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    ring = 16 * 64 * 48 * 2 * 8 * 256 * 4
    fixed = plan(tmp_path, "400GB", max_num_seqs=4)["formats"]["bf16"]["fixed_bytes"]
    for num_rings in (1, 3, 4):
        # Half a ring more is room for nothing that is long.
        memory = f"{int((fixed + num_rings * ring + ring / 2) / 0.9) + 1}B"
        planned = plan(tmp_path, memory, max_num_seqs=4)
        form = planned["formats"]["bf16"]
        longest = planned["max_position_embeddings"]
        assert form["full_requests"] == num_rings
        assert form["largest_context"] == longest
        assert form["pool_window_pages"] == 16 * num_rings + 8 * (num_rings < 4)
        assert form["pool_tokens"] == num_rings * longest + 8 * 64 * (num_rings < 4)
        assert form["pool_bytes"] == form["pool_window_pages"] * ring // 16
        text = render(planned)
        assert "a token of context takes 0 B, in a window 786,432 B more" in text
        labels = re.findall(r"^  (\S.*?)  ", text, flags=re.MULTILINE)
        assert labels == ["pages of windows", "tokens", "largest context", f"requests of {longest:,}"]
        assert "4,294,967" not in text
    # W12 makes room for windows, not for a longer context.
    pools = {name: planned["formats"][name]["pool_window_pages"] for name in ("bf16", "w12")}
    assert planned["pool_ratio"] == pools["w12"] / pools["bf16"]


def test_short_requests_take_no_whole_window():
    """Of many requests a window each would not fit the card, of requests that are shorter all do."""
    windows = 300 * 1024 * 655_360
    planned = plan(GEMMA_12B, "141GB", max_num_seqs=300)
    assert windows > planned["budget_bytes"]
    for form in planned["formats"].values():
        assert 16 < form["pool_window_pages"] < 300 * 16
        assert form["pool_pages"] >= 4096
    short = plan(GEMMA_12B, "141GB", max_num_seqs=300, max_model_len=256)
    assert all(form["pool_window_pages"] == 300 * 4 for form in short["formats"].values())
    assert all(form["full_requests"] >= 300 for form in short["formats"].values())


def test_a_directory_without_config(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        plan(tmp_path)
    shutil.copy(DFLASH2_27B / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="`DFlash2DraftModel` is a drafter, expected a target"):
        plan(tmp_path)


def test_a_longer_context_than_fits_is_said():
    planned = plan(QWEN_27B, "70GB", max_num_seqs=1)
    form = planned["formats"]["bf16"]
    assert 0 < form["pool_tokens"] < planned["max_model_len"]
    assert form["full_requests"] == 0 < form["missing_bytes"]
    assert f"set max_model_len to {form['pool_tokens']:,} or less" in render(planned)
    fits = plan(QWEN_27B, "70GB", max_num_seqs=1, max_model_len=form["pool_tokens"])
    assert fits["formats"]["bf16"]["full_requests"] == 1
    assert fits["formats"]["bf16"]["missing_bytes"] == 0


def test_human_sizes():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 65_536: "65.5 kB", 999_960: "1.00 MB"}
    sizes |= {80 * 10**9: "80.0 GB", 53_790_000_000: "53.8 GB", 2 * 10**12: "2.00 TB"}
    assert {size: human_bytes(size) for size in sizes} == sizes


def test_the_table():
    result = specpilot("plan", QWEN_27B, "--drafter", DFLASH2_27B, "--memory", "80GB", "--device", "cuda")
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    table = [line for line in lines[rule - 1 :] if line][: lines[rule:].index("") + 1]
    assert len({len(line) for line in table}) == 1, "columns line up"
    assert table[0].split() == ["BF16", "W12", "FP8"]
    assert "linear layers" in text
    assert "In memory W12 is estimated at 12.154 bits" in text
    assert "The KV pool is 3.18 times as large with W12." in text
    assert "26.896 B parameters" in lines[0]
    assert result.stderr == b""


def test_json_on_the_command_line():
    arguments = ("plan", LLAMA_8B, "--memory", "24GiB", "--max-num-seqs", "2", "--max-model-len", "8192")
    result = specpilot(*arguments, "--device", "cuda", "--head", "dense", "--json")
    planned = json.loads(result.stdout)
    assert planned["memory_bytes"] == 24 * 2**30
    assert (planned["max_num_seqs"], planned["max_model_len"]) == (2, 8192)
    assert planned["formats"]["w12"]["bytes"]["lm_head_copy"] == 0
    here = json.loads(specpilot("plan", TARGET_DIR, "--json").stdout)
    assert (here["device"], here["memory_source"]) == ("cpu", "available")
    assert here["memory_bytes"] > here["budget_bytes"] > 0


def test_errors_on_the_command_line(tmp_path: Path):
    assert "such as 80GB" in error_of("plan", QWEN_27B, "--memory", "80 gigs")
    assert "config.json" in error_of("plan", tmp_path, "--memory", "1GB")
    assert "max_num_seqs" in error_of("plan", QWEN_27B, "--memory", "80GB", "--max-num-seqs", "0")
    assert "no such directory" in error_of("plan", tmp_path / "nothing")


LIMITED = """
import resource, sys
from specpilot_rs import LLM, OptionError, doctor
def mapped():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (mapped() + (200 << 20),) * 2)
[memory] = [f for f in doctor.examine(None) if f.what == "memory"]
assert float(memory.message.split()[0]) < 0.21, memory
try:
    LLM.demo(max_num_seqs=1024, head="dense", num_threads=1)
except OptionError as error:
    print(error)
"""


def test_a_limit_on_the_process_is_a_limit_on_the_engine():
    result = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "are missing" in result.stdout


def test_a_model_that_w12_does_not_pay_for(tmp_path: Path):
    config = json.loads((LLAMA_8B / "config.json").read_bytes())
    config |= {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 8}))
    planned = plan(tmp_path, "40GB")
    assert planned["formats"]["w12"]["num_w12_matrices"] == 0
    assert "W12 pays for no matrix of this model" in render(planned)
