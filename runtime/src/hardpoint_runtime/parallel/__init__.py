"""A model over several ranks: who sits where, what each holds, and how they exchange tensors."""
