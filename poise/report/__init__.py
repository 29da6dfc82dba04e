"""What people look at: attention on a sentence, step by step, in a terminal or as a page, in five languages."""
