"""The office: instructions in, commands out. It knows where every tensor is and never holds one."""
