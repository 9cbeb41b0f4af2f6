"""The nixl transport: one-sided READs by the ranks or WRITEs by the trainer, over NIXL."""
