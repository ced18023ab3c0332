"""Which layers are split, and how: from annotations, Hugging Face plans, and patterns."""
