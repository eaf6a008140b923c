"""Backends that a Triton server has and that are not here, nor in an installed package: the ways out, in one table.

A folder that names one of them was written for a server that has it. Its owner is told what can be done with the same
model, in lines that can be copied, and not only that something is missing. registry.find() raises the text, so it is said
at the start, by `neptrio check` and by load calls.
"""

from __future__ import annotations

_PROVIDER = (
    'backend: "onnxruntime" and optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    " in config.pbtxt (pip install 'onnxruntime-gpu[cuda,cudnn]' and TensorRT's libraries)"
)
# backend -> what to do with its models
WAYS = {
    "tensorrt": (
        "a plan holds code for one kind of GPU and one release of TensorRT, which Triton's compiled backend runs. Serve the "
        f"ONNX file that it was built from as 1/model.onnx with ONNX Runtime's TensorRT provider: {_PROVIDER}"
    ),
    "tensorrtllm": (
        "Triton's compiled backend runs engines of TensorRT-LLM. Serve the model's Hugging Face folder from a Python model "
        '(backend: "python") that calls vllm or tensorrt_llm.LLM in its execute()'
    ),
    "dali": (
        'Triton\'s compiled backend runs pipelines of DALI. Run the pipeline in a Python model: backend: "python" and '
        "1/model.py, whose initialize() calls nvidia.dali.Pipeline.deserialize(filename='model.dali') (pip install "
        "nvidia-dali-cuda120), as a step of an ensemble where other models follow"
    ),
    "vllm": (
        "it is a Python-based backend: put the folder src of Triton's vllm_backend as 'vllm' into a folder DIR, start with "
        "--backend-directory=DIR, and pip install vllm"
    ),
    "tensorflow": (
        "convert the model once, where TensorFlow is: pip install tf2onnx, then python -m tf2onnx.convert --saved-model "
        "1/model.savedmodel --output 1/model.onnx (or --graphdef 1/model.graphdef --inputs NAME:0 --outputs NAME:0), and "
        'backend: "onnxruntime" in config.pbtxt. Or serve it as it is on OpenVINO: backend: "openvino" and '
        'default_model_filename: "model.savedmodel" (pip install openvino)'
    ),
}


def way(name: str) -> str:
    """What to tell whoever names such a backend; "" for a name that is none of them."""
    found = WAYS.get(name)
    if not found:
        return ""
    own = f"or serve Triton's own library: --backend-directory=DIR with DIR/{name}/libtriton_{name}.so in it"
    return f"backend '{name}' is not part of this server: {found}" + (f"; {own}" if name != "vllm" else "")
