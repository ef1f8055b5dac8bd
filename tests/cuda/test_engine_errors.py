"""What goes wrong with a GPU is a typed error that says what to change, and leaves the process usable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM, DeviceError, OptionError, RequestError, SamplingParams
from specpilot_rs.demo import TARGET_DIR
from specpilot_rs.tokenizer import Tokenizer

DEVICE = "cuda:0"
PARAMS = SamplingParams(max_tokens=8)
PROMPT = "1 + 1 ="


def works() -> None:
    [output] = LLM.demo(device=DEVICE, max_model_len=256).generate(PROMPT, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=r"GPU 99 does not exist: expected an index below \d"):
        LLM.demo(device="cuda:99")
    works()


def test_a_share_of_the_memory_that_is_too_small() -> None:
    with pytest.raises(OptionError, match=r"are missing; .*raise gpu_memory_utilization to 0"):
        LLM.demo(device=DEVICE, gpu_memory_utilization=1e-6)
    works()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others need memory meanwhile")
def test_a_plan_of_all_memory_holds(report: Any) -> None:
    """Slots and pages take what is free to the last page; kernels, their scratch and captures find room."""
    torch = pytest.importorskip("torch")
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (3 << 29), dtype=torch.uint8, device="cuda")
    try:
        options = {"gpu_memory_utilization": 1.0, "max_num_seqs": 128}
        llm = LLM.demo(device=DEVICE, speculative_config={"method": "dflash2", "q_passes": 1}, **options)
        outputs = llm.generate(["1 + 1 ="] * 3, PARAMS, use_tqdm=False)
        assert all(output.outputs[0].token_ids for output in outputs)
        left, _ = torch.cuda.mem_get_info()
        report(f"{DEVICE}: of a plan of all memory {left / 2**20:.0f} MiB are left")
        del llm
    finally:
        del hog
        torch.cuda.empty_cache()
    works()


def test_a_driver_without_gpus_is_an_error_at_once() -> None:
    code = "from specpilot_rs import LLM; LLM.demo(device='cuda:0')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "DeviceError: " in result.stderr
    automatic = code.replace("cuda:0", "auto") + ".generate('a', use_tqdm=False)"
    subprocess.run(
        [sys.executable, "-c", automatic],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=60,
        check=True,
    )


def poisoned_target(directory: Path) -> Path:
    """The demo target with NaN in the embedding of the token that `PROMPT` begins with."""
    shutil.copytree(TARGET_DIR, directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.embed_tokens.weight"
    file = directory / index[name]
    data = bytearray(file.read_bytes())
    num_header = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + num_header])[name]
    token_id = Tokenizer(directory).encode(PROMPT)[0]
    at = 8 + num_header + entry["data_offsets"][0] + 2 * token_id * entry["shape"][1]
    data[at : at + 2] = (0x7FC0).to_bytes(2, "little")
    file.write_bytes(data)
    return directory


@pytest.mark.parametrize("speculation", [None, {"method": "ngram"}], ids=["plain", "ngram"])
def test_weights_that_are_no_numbers_end_the_request(tmp_path: Path, speculation: Any) -> None:
    llm = LLM(
        poisoned_target(tmp_path / "target"), device=DEVICE, max_model_len=256, speculative_config=speculation
    )
    for _ in range(2):
        with pytest.raises(RequestError, match="should be a finite number, got NaN"):
            llm.generate(PROMPT, PARAMS, use_tqdm=False)
    works()
