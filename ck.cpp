#include "codes/heads.cpp"
