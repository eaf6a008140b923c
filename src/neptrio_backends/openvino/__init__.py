"""backend: "openvino": IR and ONNX files on OpenVINO (docs/openvino.md).

model   the backend: parameters, auto-completion, batches
"""
