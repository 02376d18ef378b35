"""Run lm_eval on the questions of the test data. Runs in lm_eval's environment, not in Syringa's.

python lm_eval_run.py QUESTIONS RESULT MODEL KEY=VALUE…: MODEL is lm_eval's name of a model type.
"""

import json
import sys

import lm_eval

questions, result, model, *arguments = sys.argv[1:]
task = {
    "task": "questions",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": questions}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
found = lm_eval.simple_evaluate(
    model, model_args=",".join(arguments), tasks=[task], log_samples=True, bootstrap_iters=0
)
figures = found["results"]["questions"]
summary = {
    "acc": figures["acc,none"],
    "acc_norm": figures["acc_norm,none"],
    "questions": len(found["samples"]["questions"]),
    # Log-likelihood of each choice of each question.
    "scores": [[float(each[0]) for each in sample["filtered_resps"]] for sample in found["samples"]["questions"]],
}
with open(result, "w", encoding="utf-8") as file:
    json.dump(summary, file)
