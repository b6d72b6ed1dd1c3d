class NumPyEngine:
    pass
