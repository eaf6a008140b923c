"""The speech detection example: the server's answers are those of the model run locally, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.examples.test_examples import EXAMPLES, load
from tests.support.server import ServerProcess

prepare = load(EXAMPLES / "prepare.py")
speech_detection = load(EXAMPLES / "speech_detection.py")
AUDIO = EXAMPLES / "audio" / "speech.wav"


def test_speech_detection(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "model_repository" / "speech_detection", tmp_path / "speech_detection")
    prepare.prepare_speech_detection(tmp_path)
    samples = speech_detection.read(str(AUDIO))
    session = onnxruntime.InferenceSession(tmp_path / "speech_detection" / "1" / "model.onnx")
    state = np.zeros((2, 1, 128), np.float32)
    expected = []
    for chunk in speech_detection.chunks(samples):
        output, state = session.run(["output", "stateN"], {"input": chunk, "state": state})
        expected.append(output[0, 0])
    with ServerProcess(tmp_path) as server:
        got = speech_detection.probabilities(server.grpc, samples)
        again = speech_detection.probabilities(server.grpc, samples)
        text = subprocess.run(
            [sys.executable, str(EXAMPLES / "speech_detection.py"), f"--url={server.grpc}", str(AUDIO)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    assert np.array(got).tobytes() == np.array(expected).tobytes() == np.array(again).tobytes()
    # the file: 0.6 s of silence, a phrase, 0.9 s of silence, a phrase, 0.6 s of silence
    found = speech_detection.segments(got)
    assert len(found) == 2 and found[0][1] + 0.5 < found[1][0]
    assert text.splitlines() == [f"speech from {a:.2f} s to {b:.2f} s" for a, b in found]


@pytest.mark.parametrize("wrong", ["no/such.wav", __file__])
def test_a_file_that_is_none_is_named(wrong: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "speech_detection.py"), wrong], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
