"""The tokenizer against SentencePiece itself, on texts that a conversion gets wrong first."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("sentencepiece", reason="sentencepiece comes with the extra pretrain")
pytest.importorskip("mistral_common", reason="mistral-common comes with the extra pretrain")
pytest.importorskip("transformers", reason="transformers comes with the extra pretrain")

from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runningtensor.pretrain.tokenizer import mistral, model_file

WRITTEN = [
    "",
    " ",
    "\n",
    "\t",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    " leading",
    "trailing ",
    "   both   ",
    "line\nline\n\n\nline\r\n\r",
    "\ttab\t\ttabs\t \t mixed",
    "def f(x: int) -> int:\n    if x > 0:\n        return x ** 2\n\telse:\n\t\treturn 0x1F  # 31\n",
    '<a href="https://example.org/?q=%20&amp;x=1">link</a>',
    "for(;;){i++;}//!=<=>=&&||",
    "1234567890 3.14159 1,000,000 -5e-10 ½ ² ₂ Ⅷ",
    "</s>",
    "<s>text</s><unk>",
    "a <s>struck</s> word",
    "<0x0A> and <0xFF>",
    "▁",
    "a▁b ▁▁ c",
    "Größe, naïve café, Žluťoučký kůň, İstanbul, ﬁancé",
    "Съешь ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを、カタカナ、漢字。",
    "敏捷的棕色狐狸跳过了懒狗，梦。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "เป็นมนุษย์สุดประเสริฐ",
    "ሰማይ አይታረስ ንጉሥ አይከሰስ",
    "𐌼𐌰𐌲 𐌲𐌻𐌴𐍃 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓁐 𠜎𠜱",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 text 🧿",
    "e\u0301 a\u0308\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "\x00",
    "a\x00b\x01\x02\x1b[31m\x7f\x80\x9f",
    "\ufeffBOM \u200b\u200d\u200e\u202e\u2028\u2029\u00a0\u3000",
    "\ufffd\ufffe\uffff\U0010ffff\ue000",
    "a" * 5000,
    "supercalifragilisticexpialidocious" * 40,
    "ab" * 3000 + " " + "=" * 999 + "\n" + "-" * 1234,
    "hahahahaha banana ananas Mississippi ................ ,,,,,,",
]


def spaces() -> list[str]:
    return [" " * n + word + " " * m for n in range(36) for word in ("", "a", "🧿", "\n") for m in (0, 1, 17)]


def overlapping(model: SentencePieceProcessor) -> list[str]:
    """Pieces that end as they begin, twice with that part shared: two merges of one score then compete."""
    pieces = [model.id_to_piece(i) for i in range(259, len(model))]
    twice = [p + p[k:] for p in pieces for k in range(1, len(p)) if p[:k] == p[-k:]]
    return [text.replace("▁", " ") for text in twice]


def drawn(model: SentencePieceProcessor) -> list[str]:
    rng = random.Random(0)
    out = []
    for _ in range(300):
        pieces = [model.id_to_piece(rng.randrange(259, len(model))) for _ in range(rng.randint(1, 12))]
        top = rng.choice([0x80, 0x800, 0x10000, 0x110000])
        characters = [chr(c) for c in (rng.randrange(top) for _ in range(60)) if not 0xD800 <= c < 0xE000]
        repeated = "".join(rng.choices("abceinost ", k=rng.randint(1, 4))) * rng.randint(1, 20)
        out += ["".join(pieces).replace("▁", " "), "".join(characters), repeated]
    return out


def documentation() -> list[str]:
    files = sorted(Path("/usr/share/doc").rglob("*"))[::5]
    out = []
    for file in files:
        if file.is_file() and file.stat().st_size < 200_000:
            try:
                out.append(file.read_text("utf-8"))
            except (UnicodeDecodeError, PermissionError):
                continue
    return out[:400]


@pytest.fixture(scope="module")
def model() -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(model_file()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """As a user has it: saved, and loaded by AutoTokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    mistral().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("texts", ["written", "spaces", "overlapping", "drawn", "documentation"])
def test_agrees_with_sentencepiece(model, tokenizer, texts: str) -> None:
    chosen = {
        "written": lambda: WRITTEN,
        "spaces": spaces,
        "overlapping": lambda: overlapping(model),
        "drawn": lambda: drawn(model),
        "documentation": documentation,
    }[texts]()
    if not chosen:
        pytest.skip("/usr/share/doc has no texts")
    wrong = [text for text in chosen if tokenizer(text)["input_ids"] != model.encode(text)]
    assert not wrong, f"{len(wrong)} of {len(chosen)} texts differ, such as {wrong[0]!r:.200}"
    for text in chosen:
        ids = model.encode(text)
        assert tokenizer.decode(ids) == model.decode(ids) == text.replace("▁", " ")


def test_batches_and_single_texts_agree(tokenizer) -> None:
    assert tokenizer(WRITTEN)["input_ids"] == [tokenizer(text)["input_ids"] for text in WRITTEN]


def test_vocabulary_is_the_models(model, tokenizer) -> None:
    assert len(tokenizer) == len(model) == 32_000
    assert tokenizer.convert_ids_to_tokens(list(range(32_000))) == [model.id_to_piece(i) for i in range(32_000)]
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_bytes_that_are_no_text_decode_as_sentencepiece_does(model, tokenizer) -> None:
    for ids in ([3 + 0xFF], [3 + 0xE2, 3 + 0x96], [3 + 0xF0, 3 + 0x9F, 3 + 0xA7, 3 + 0xBF]):
        assert tokenizer.decode(ids) == model.decode(ids)


def test_tokenizer_is_the_same_each_time(tokenizer) -> None:
    first, second = (mistral().backend_tokenizer.to_str() for _ in range(2))
    assert first == second
    assert len(json.loads(first)["model"]["merges"]) > 31_000
