"""Operations worth a kernel of their own, one a file: the plain-torch twin, which defines it, and the
Triton form.

`dispatch.runs_triton` alone decides which of the two a call takes.
"""
