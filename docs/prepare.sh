# What several pages take as given, for their hidden blocks:
#     bash docs/prepare.sh data DIR             my_texts/, packed into DIR
#     bash docs/prepare.sh run STEPS EVERY      the same in data/mine, and run.yml: a very small run, its checkpoints
#     bash docs/prepare.sh texts FILE           four texts with labels
#     bash docs/prepare.sh classifier RUN       texts.csv, and a very small classifier trained on it
set -e
case "$1" in
data)
    python -m ipu_packed_bert build --corpus my_texts/ --max-sequence-length 128 --vocabulary-size 300 \
        --duplication-factor 1 --out "$2"
    ;;
run)
    bash "$0" data data/mine
    cat > run.yml <<END
extends: packed_host
data: {held_out: 0}
model: {hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 64}
batch: {gradient_accumulation: 2}
run: {steps: $2, evaluate_every: 0, checkpoint_every: $3}
END
    ;;
texts)
    cat > "$2" <<END
text,label
the card has not come,card
where is my money,transfer
my card is lost,card
the transfer failed,transfer
END
    ;;
classifier)
    bash "$0" texts texts.csv
    packed-bert finetune --config configs/finetune_banking77_packed.yml --data-dir . --out "$2" \
        --set data.training=texts.csv --set data.evaluation=null --set task.text_column=text --set task.label_column=label \
        --set data.training_examples=null --set data.evaluation_examples=null --set model.checkpoint=null \
        --set model.hidden_size=32 --set model.num_layers=1 --set model.num_heads=2 --set model.intermediate_size=64 \
        --set run.epochs=1
    ;;
esac
