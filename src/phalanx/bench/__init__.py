"""``phalanx bench``: how long operations take, alone and beside other libraries.

The coordinator (`teams`, `measurement`) commands living ranks (`ranks`), one team for each
implementation (`peers`), which take turns. What an operation is, is said without torch
(`operations`); what it is asked with and must result in, with it (`values`, `libraries`, `cells`).
"""
