"""The onnxruntime backend: runs ONNX models with ONNX Runtime (docs/onnx.md)."""
