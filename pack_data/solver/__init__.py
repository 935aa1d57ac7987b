"""The solver of the optimal packer: linear programmes over strategies, and whole packs from their solutions."""
