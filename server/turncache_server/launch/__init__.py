"""The launcher: engines and router as child processes of one program, and nothing left behind."""
