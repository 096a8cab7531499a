"""Checkpoints in logical, unfused, unpadded tensors, so that any layout and any number of units resumes.

One unit of each model writes; the driver decides. Nothing is believed before the rename.

    driver   begin(root, step)            -> root/step-000012.tmp/
    ranks    write_part(tmp, "actor", …)  -> actor/part-00003.safetensors      (each rank the boxes it owns)
    driver   commit(tmp, parts, control)  -> actor/index.json, control.json, COMMIT; rename to step-000012
    driver   latest(root), open_checkpoint(path)      sizes and checksums compared with COMMIT
    ranks    checkpoint.source("actor")               reads the boxes that its pieces name, at any layout
"""
