"""Contents of tokenizer.json: byte-level, WordPiece, and whole words with any special tokens around them."""

from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers, processors, trainers

from pack_data.text.vocabulary import SPECIAL_TOKENS

TEXTS = ["The packer packs packed packs.", "A packing of packs: unpacked, repacked!", "Ünïcode and 数字 too."] * 5
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# The vocabulary of all-mpnet-base-v2's kind: RoBERTa's special tokens beside BERT's.
BOTH = "<s> <pad> </s> <unk> [PAD] [UNK] [CLS] [SEP] [MASK] a b <mask>".split()
A = BOTH.index("a")
B = BOTH.index("b")
PIECES = (*SPECIAL_TOKENS, "un", "##pack", "##ed", "a")


def byte_level(special=ROBERTA, size=300):
    """Return a byte-level BPE, as RoBERTa and GPT-2 have, that also truncates and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)  # of the file, and not meant for packing
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str().encode()


def wordpiece(tokens=PIECES):
    """Return BERT's own, with one word that has pieces."""
    numbers = {token: number for number, token in enumerate(tokens)}
    return BertWordPieceTokenizer(numbers).to_str().encode()


def word_tokenizer(single=None, pair="$A $B:1", tokens=BOTH, post_processor=None):
    """Return a tokenizer of whole words, with a post-processor of these templates."""
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if single:
        special = [(token, numbers[token]) for token in BOTH if token in f"{single} {pair}" and len(token) > 1]
        post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    if post_processor:
        tokenizer.post_processor = post_processor
    return tokenizer.to_str().encode()


def roberta_processing(separator=2, first=0):
    return processors.RobertaProcessing(("</s>", separator), ("<s>", first))


def roberta():
    return word_tokenizer(post_processor=roberta_processing())


def bert():
    return word_tokenizer(post_processor=processors.BertProcessing(("[SEP]", 7), ("[CLS]", 6)))
