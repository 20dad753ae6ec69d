"""Two small lm-eval tasks, written from the sentences of this repository's own pages.

*continue*: which of four endings belongs to a sentence (loglikelihood). *repeat*: the same sentence once more
(generate_until). Neither says how good a model is; two ways to run one model must score alike.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

CONTINUE, REPEAT = "pdserve_continue", "pdserve_repeat"
NUM_CHOICES = 4
_WORDS = range(8, 25)


def sentences(text: str) -> list[str]:
    """The plain ones of a Markdown page."""
    words = " ".join(re.sub(r"[`*|\[\]()#]", " ", text).split())
    found = re.findall(r"[A-Z][^.:;]+\.", words)
    return [sentence for sentence in found if len(sentence.split()) in _WORDS]


def write_tasks(folder: Path, pages: Sequence[Path], num_documents: int) -> None:
    """Write data and task files into `folder`, for `lm-eval --include_path`."""
    chosen = [found for page in pages for found in sentences(page.read_text(encoding="utf-8"))][:num_documents]
    assert len(chosen) == num_documents, f"the pages have only {len(chosen)} plain sentences"
    halves = []
    for sentence in chosen:
        words = sentence.split()
        halves.append((" ".join(words[: len(words) // 2]), " " + " ".join(words[len(words) // 2 :])))
    documents = []
    for number, (begin, _) in enumerate(halves):
        endings = [halves[(number + step) % len(halves)][1] for step in range(NUM_CHOICES)]
        right = number % NUM_CHOICES  # not always the first
        endings[0], endings[right] = endings[right], endings[0]
        documents.append({"begin": begin, "endings": endings, "right": right, "sentence": chosen[number]})
    data = folder / "sentences.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    (folder / f"{CONTINUE}.yaml").write_text(
        f"task: {CONTINUE}\n{common}output_type: multiple_choice\n"
        'doc_to_text: "{{begin}}"\ndoc_to_choice: "{{endings}}"\ndoc_to_target: right\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        encoding="utf-8",
    )
    (folder / f"{REPEAT}.yaml").write_text(
        f"task: {REPEAT}\n{common}output_type: generate_until\n"
        'doc_to_text: "Sentence: The sea is deep.\\nAgain: The sea is deep.\\n\\nSentence: {{sentence}}\\nAgain:"\n'
        'doc_to_target: " {{sentence}}"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  do_sample: false\n  max_gen_toks: 40\n'
        "metric_list:\n  - metric: exact_match\n",
        encoding="utf-8",
    )
