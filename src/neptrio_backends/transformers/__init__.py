"""backend: "transformers": folders of Hugging Face models (docs/transformers.md).

model        the backend: auto-completion, and which of the tasks an instance has
hf_folder    what a folder holds: its task, tensors and limits. Nothing of it is run or imported
hf_lengths   which rows of a batch are padded together
hf_results   what is made of scores: labels, words, tokens
hf_tasks     a batch through a model that answers at once
hf_loading   models, tokenizers and image processors, from the folder alone
hf_generate  text, for several requests at once, token by token
hf_sampling  the next token, and pieces of text of tokens
"""
