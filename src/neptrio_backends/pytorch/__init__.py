"""backend: "pytorch": TorchScript, torch.export and AOTInductor (docs/pytorch.md).

model        the backend: parameters, auto-completion, batches
torch_files  finds and loads such files, and tells what they say of their inputs and outputs
torch_names  which tensor of a configuration is which argument or result
"""
