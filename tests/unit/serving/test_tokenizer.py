"""The tokenizer gives what transformers gives for the same folder."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors

from serving.chat_template import ChatTemplate, ChatTemplateError
from serving.tokenizer import Tokenizer, TokenizerFileError

_MODEL_FOLDER = Path.home() / ".cache" / "pdserve" / "models" / "smollm2-135m"

TEXTS = (
    "",
    "Hello world",
    "  two leading spaces",
    "12345 6789",
    "naïve café 中文 😀\n\t x",
    "<|im_start|>user\nhi<|im_end|>",
    "the<|endoftext|>end",
    "a" * 300,
    "\x00\u2028\ufeffx",
    " \n\n  \n",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi 😀\n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<b>two</b> & 'three'"},
        {"role": "user", "content": "{{ messages }} <|im_end|>"},
    ],
)


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode_verbatim(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    for chat in CHATS:
        assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ours.encode_chat(chat) == ids


@pytest.mark.model
@pytest.mark.skipif(not _MODEL_FOLDER.is_dir(), reason="SmolLM2 is not fetched; run `make model`")
def test_the_real_model_tokenizes_and_chats_as_in_transformers() -> None:
    assert_equal_to_transformers(_MODEL_FOLDER)


@pytest.mark.parametrize(
    "changes", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
def test_special_token_rules_are_those_of_transformers(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, bool]
) -> None:
    folder = changed_settings(tiny_folder, tmp_path, **changes)
    assert_equal_to_transformers(folder)


def test_special_tokens_of_the_files_post_processor_are_added_as_in_transformers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = changed_settings(tiny_folder, tmp_path)
    backend = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("a")[::2] == [1, 2]
    assert_equal_to_transformers(folder)


def test_truncation_and_padding_in_the_file_do_not_apply_to_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    folder = changed_settings(tiny_folder, tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert len(Tokenizer.load(folder).encode("Once upon a time")) > 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}x\n",
        "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- set ns.n = ns.n + 1 %}{%- endfor %}{{ ns.n }}",
        "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{{ tools is none }}{{ documents is none }}",
        "{{ messages[0]['content'].strip()[:3] | upper }}{{ eos_token ~ pad_token }}",
    ],
)
def test_template_features_render_as_in_transformers(tiny_folder: Path, tmp_path: Path, template: str) -> None:
    folder = changed_settings(tiny_folder, tmp_path, chat_template=template)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for chat in CHATS:
        assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_a_template_file_wins_over_the_settings_and_named_ones_have_a_default(
    tiny_folder: Path, tmp_path: Path
) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = changed_settings(tiny_folder, tmp_path, chat_template=named)
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "plain"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "file"


def test_the_date_in_a_template_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2024, 7, 26))
    assert template.render(CHATS[0]) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why_and_cannot_escape(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}, datetime.now).render(CHATS[0])


def test_a_broken_template_is_refused_at_the_start() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {}, datetime.now)


def test_a_model_without_a_template_cannot_chat(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(changed_settings(tiny_folder, tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(CHATS[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(tiny_folder: Path, tmp_path: Path, name: str, content: str | None) -> None:
    folder = changed_settings(tiny_folder, tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerFileError, match=name):
        Tokenizer.load(folder)


def changed_settings(source: Path, target: Path, **changes: object) -> Path:
    folder = target / "folder"
    shutil.copytree(source, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder
