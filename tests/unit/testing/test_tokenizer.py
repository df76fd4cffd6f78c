"""Sample tokenizer: every reader returns the same tokens."""

import pytest
from transformers import AutoTokenizer

from wanstream.testing import tokenizer as sample

CASES = {
    "a cat": ["\u2581", "a", "\u2581", "c", "a", "t", sample.END],
    "": [sample.END],
    "caf\u00e9!": ["\u2581", "c", "a", "f", "\u00e9", "!", sample.END],
    "a \u65e5\u672c b": ["\u2581", "a", "\u2581", sample.UNKNOWN, "\u2581", "b", sample.END],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    sample.save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("text", "tokens"), CASES.items())
def test_transformers_and_sentencepiece_read_it(folder, text, tokens):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(sample.VOCABULARY)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sample.sentencepiece_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model, add_eos=True)
    assert processor.get_piece_size() == len(sample.VOCABULARY)
    assert processor.encode(text) == [sample.VOCABULARY.index(token) for token in tokens]
    ids = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    assert ids == (0, 1, 2, -1)


def test_it_pads_and_cuts_and_keeps_the_end(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    tokens = tokenizer(["a", "abcdefgh"], padding="max_length", max_length=6, truncation=True)

    assert tokens.input_ids[0][2:] == [1, 0, 0, 0]
    assert tokens.input_ids[1][-1] == 1
    assert [sum(mask) for mask in tokens.attention_mask] == [3, 6]
