"""Export a tokenizer: tiktoken's ranks to the tokenizer.json of the tokenizers library.

Both merge the pair whose merge has the lowest rank, leftmost first. tiktoken reads the ranks of all tokens, tokenizers
a list of pairs. The pair of a token is found by merging its bytes with the merges of lower rank.
Bytes are written as in GPT-2, each as one printable character (Radford et al. 2019; their encoder.py).
"""

import itertools
import math

from tokenizer import EOT, SPLIT_PATTERN

# The same pieces in Oniguruma's words, which tokenizers reads: there $ ends a line, and {1,3}+ is one of {1,3} or more.
PATTERN = SPLIT_PATTERN.replace("{1,3}+", "{1,3}").replace("$", r"\z")
PAD = "ÿ"                                # the byte 255, which no text has in UTF-8: a pad that is not the end of a text
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOT, "eos_token": EOT, "pad_token": PAD,
          "unk_token": None, "clean_up_tokenization_spaces": False,
          "split_special_tokens": True}                                # a text's own <|endoftext|> is text

def characters():
    """[the character that stands for byte b]: itself if it is printable and no blank, or else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]

def halves(token, ranks):
    """The two tokens that merge into this one, or None if no merges lead to it."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        merged = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        i = merged.index(min(merged))
        if merged[i] == math.inf:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts

def to_tokenizers(encoding):
    """The value of tokenizer.json, for a tiktoken.Encoding of data.py. Its ids and its pieces are the same.

    It has no added tokens, which tokenizers would find in a text, too: <|endoftext|> is an entry of the vocabulary that
    no text leads to, since the pattern splits it. tokenizer_config.json says which tokens are special.
    """
    ranks = encoding._mergeable_ranks
    letters = characters()
    written = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    pairs = (halves(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1)
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}, bytes_]},
        "post_processor": None, "decoder": bytes_,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": {written(token): ranks[token] for token in sorted(ranks, key=ranks.get)}
                  | {EOT: encoding.eot_token},
                  "merges": [[*map(written, pair)] for pair in pairs if pair]},
    }
