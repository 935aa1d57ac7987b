"""Fine-tuning with packs: questions on paragraphs (SQuAD) and classification, on a CPU or a CUDA device.

    config -> task (squad | classification) -> inputs -> packing -> heads -> trainer -> predictions, metrics, export
"""
