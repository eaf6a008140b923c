"""Where somebody speaks in a WAV file: streams it in chunks of 32 ms to the model `speech_detection`.

    python examples/speech_detection.py [--url HOST:PORT] examples/audio/speech.wav

Plain tritonclient on one ModelStreamInfer call. The model is recurrent, and its state stays in the
server: the client sends samples and sequence flags, nothing else.
"""

from __future__ import annotations

import argparse
import queue
import sys
import uuid
import wave
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

RATE = 16_000
CHUNK = 512  # samples, 32 ms
CONTEXT = 64  # samples of the chunk before that each chunk begins with
SPEECH, SILENCE = 0.5, 0.35  # probabilities: speech begins above the first, ends below the second
HANGOVER = 6  # chunks that must be below before it ends


def read(path: str) -> np.ndarray:
    """A mono 16 kHz 16-bit WAV file as float32 samples in [-1, 1). Raises ValueError."""
    with wave.open(path) as file:
        found = (file.getnchannels(), file.getframerate(), file.getsampwidth())
        if found != (1, RATE, 2):
            raise ValueError(f"{path}: expected 1 channel, {RATE} Hz, 2 bytes a sample, got {found}")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


def chunks(samples: np.ndarray) -> Iterator[np.ndarray]:
    """Float32 arrays [1, 576]: a chunk after the end of the one before, the last one padded."""
    padded = np.concatenate(
        [np.zeros(CONTEXT, np.float32), samples, np.zeros(-len(samples) % CHUNK, np.float32)]
    )
    for at in range(0, len(padded) - CONTEXT, CHUNK):
        yield padded[None, at : at + CONTEXT + CHUNK]


def probabilities(url: str, samples: np.ndarray) -> list[float]:
    """The probability of speech in each chunk, from the server."""
    answers: queue.Queue = queue.Queue()
    pieces = list(chunks(samples))
    sequence = str(uuid.uuid4())
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i, piece in enumerate(pieces):
            tensor = grpcclient.InferInput("input", [1, CONTEXT + CHUNK], "FP32")
            tensor.set_data_from_numpy(piece)
            client.async_stream_infer(
                "speech_detection",
                [tensor],
                sequence_id=sequence,
                sequence_start=i == 0,
                sequence_end=i == len(pieces) - 1,
            )
        found = []
        for _ in pieces:
            result, error = answers.get(timeout=30)
            if error is not None:
                raise error
            found.append(result.as_numpy("output")[0, 0])
        client.stop_stream()
    return found


def segments(found: list[float]) -> list[tuple[float, float]]:
    """(begin, end) of each stretch of speech, in seconds."""
    made, begin, quiet = [], None, 0
    for i, p in enumerate([*found, *([0.0] * HANGOVER)]):
        if p >= SPEECH:
            begin = i if begin is None else begin
            quiet = 0
        elif begin is not None and p < SILENCE:
            quiet += 1
            if quiet == HANGOVER:
                made.append((begin * CHUNK / RATE, (i - HANGOVER + 1) * CHUNK / RATE))
                begin, quiet = None, 0
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints where somebody speaks in a WAV file.")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address")
    parser.add_argument("file", metavar="FILE", help="mono, 16 kHz, 16 bits a sample")
    options = parser.parse_args()
    try:
        found = probabilities(options.url, read(options.file))
    except (OSError, ValueError, EOFError, wave.Error, InferenceServerException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for begin, end in segments(found):
        print(f"speech from {begin:.2f} s to {end:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
