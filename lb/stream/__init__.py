"""What requests to models and their streams say: prompts, token usage, transcripts, and how a broken stream resumes.

Pure: bytes and JSON in, values out.
"""
