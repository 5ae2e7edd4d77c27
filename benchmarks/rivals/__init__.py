"""Published ways to shrink a key–value cache, written from their papers, and measured at equal bytes.

`__main__` measures; each other file is one method, or what several of them share.
"""
