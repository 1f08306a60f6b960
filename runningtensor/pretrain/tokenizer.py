"""Mistral's first tokenizer, of 32,000 entries, as a fast tokenizer that agrees with SentencePiece on every text.

SentencePiece merges, among all neighbours that together are a piece, those whose piece has the highest score, the
leftmost of equals. `tokenizers` merges by the rank of the pair instead, so pairs are ranked by the score of what they
make. Only runs of spaces share a score (the lowest): SentencePiece lets the leftmost grow as far as it can before it
begins another, and so does a rank by length, the longest first.
"""

from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPACE = "▁"


def model_file() -> Path:
    """The SentencePiece model, which mistral-common brings with it."""
    try:
        path = Path(str(resources.files("mistral_common"))) / "data" / "tokenizer.model.v1"
    except ModuleNotFoundError as error:
        raise ImportError("the tokenizer is in mistral-common: pip install 'runningtensor[pretrain]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"mistral-common must have {path}, but this version has not")
    return path


def mistral(path: Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer; `save_pretrained` makes a folder that AutoTokenizer loads. It adds neither <s> nor </s>."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(path or model_file()))
    ids = range(len(model))
    pieces = [model.id_to_piece(i) for i in ids]
    # Bytes are for characters without a piece: the text "<0x0A>" must never be merged into one.
    normal = [i for i in ids if not (model.is_unknown(i) or model.is_control(i) or model.is_byte(i))]
    scores = {pieces[i]: model.get_score(i) for i in normal}
    merges = [(p[:i], p[i:]) for p in scores for i in range(1, len(p)) if p[:i] in scores and p[i:] in scores]
    merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0] + pair[1]), -len(pair[0])))

    unknown, begin, end = pieces[model.unk_id()], pieces[model.bos_id()], pieces[model.eos_id()]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    fast = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    fast.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in (unknown, begin, end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in a text is text (HTML has it), as it is to SentencePiece
    )
