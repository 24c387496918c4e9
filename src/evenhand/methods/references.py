"""The papers that the methods come from, in words and as BibTeX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A paper.

    Examples:
      >>> print(ABADI.bibtex.splitlines()[0])
      @inproceedings{abadi2016deep,
    """

    key: str
    who: str
    year: int
    title: str
    authors: str
    where: str

    @property
    def text(self) -> str:
        """One line for tables."""
        return f"{self.who} {self.year}, {self.title}"

    @property
    def bibtex(self) -> str:
        """Return an entry for a .bib file; ``where`` holds its kind and its further fields."""
        kind, *fields = self.where.split("; ")
        pairs = [("title", self.title), ("author", self.authors), ("year", str(self.year))]
        pairs += [tuple(field.split("=", 1)) for field in fields]  # type: ignore[misc]
        lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in pairs)
        return f"@{kind}{{{self.key},\n{lines}\n}}"


ABADI = Reference(
    "abadi2016deep",
    "Abadi et al.",
    2016,
    "Deep Learning with Differential Privacy",
    "Abadi, Mart{\\'i}n and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal "
    "and Zhang, Li",
    "inproceedings; booktitle=ACM SIGSAC Conference on Computer and Communications Security; pages=308--318",
)
BU_2023 = Reference(
    "bu2023automatic",
    "Bu et al.",
    2023,
    "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
    "Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George",
    "inproceedings; booktitle=Advances in Neural Information Processing Systems; volume=36",
)
YANG = Reference(
    "yang2022normalized",
    "Yang et al.",
    2022,
    "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex Optimization",
    "Yang, Xiaodong and Zhang, Huishuai and Chen, Wei and Liu, Tie-Yan",
    "misc; eprint=2206.13033; archiveprefix=arXiv",
)
XIA = Reference(
    "xia2023differentially",
    "Xia et al.",
    2023,
    "Differentially Private Learning with Per-Sample Adaptive Clipping",
    "Xia, Tianyu and Shen, Shuheng and Yao, Su and Fu, Xinyi and Xu, Ke and Xu, Xiaolong and Fu, Xing",
    "inproceedings; booktitle=AAAI Conference on Artificial Intelligence; volume=37",
)
BU_2021 = Reference(
    "bu2021convergence",
    "Bu et al.",
    2021,
    "On the Convergence and Calibration of Deep Learning with Differential Privacy",
    "Bu, Zhiqi and Wang, Hua and Dai, Zongyu and Long, Qi",
    "misc; eprint=2106.07830; archiveprefix=arXiv",
)
ESIPOVA = Reference(
    "esipova2022disparate",
    "Esipova et al.",
    2022,
    "Disparate Impact in Differential Privacy from Gradient Misalignment",
    "Esipova, Maria S. and Ghomi, Atiyeh Ashari and Luo, Yaqiao and Cresswell, Jesse C.",
    "misc; eprint=2206.07737; archiveprefix=arXiv",
)
CHILUKOTI_2023 = Reference(
    "chilukoti2023auto",
    "Chilukoti et al.",
    2023,
    "Auto DP-SGD: Dual Improvements of Privacy and Accuracy via Automatic Clipping Threshold and Noise Multiplier "
    "Estimation",
    "Chilukoti, Sai Venkatesh and Hossen, Md Imran and Shan, Liqun and Tida, Vijay Srinivas and Hei, Xiali",
    "misc; eprint=2312.02400v1; archiveprefix=arXiv",
)
CHILUKOTI_2025 = Reference(
    "chilukoti2025global",
    "Chilukoti et al.",
    2025,
    "DP-SGD-Global-Adapt-V2-S: Triad Improvements of Privacy, Accuracy and Fairness via Step Decay Noise Multiplier "
    "and Step Decay Upper Clipping Threshold",
    "Chilukoti, Sai Venkatesh and Hossen, Md Imran and Shan, Liqun and Tida, Vijay Srinivas and Bappy, Mahathir "
    "Mohammad and Tian, Wenmeng and Hei, Xiali",
    "misc; eprint=2312.02400v2; archiveprefix=arXiv",
)
XU = Reference(
    "xu2021removing",
    "Xu et al.",
    2021,
    "Removing Disparate Impact on Model Accuracy in Differentially Private Stochastic Gradient Descent",
    "Xu, Depeng and Du, Wei and Wu, Xintao",
    "inproceedings; booktitle=ACM SIGKDD Conference on Knowledge Discovery and Data Mining",
)
BOENISCH = Reference(
    "boenisch2024have",
    "Boenisch et al.",
    2024,
    "Have it your way: Individualized Privacy Assignment for DP-SGD",
    'Boenisch, Franziska and M{\\"u}hl, Christopher and Dziedzic, Adam and Rinberg, Roy and Papernot, Nicolas',
    "inproceedings; booktitle=Advances in Neural Information Processing Systems; volume=36",
)
TIAN = Reference(
    "tian2026ino",
    "Tian et al.",
    2026,
    "INO-SGD: Addressing Utility Imbalance under Individualized Differential Privacy",
    "Tian, Xiao and Fan, Jue and Sim, Rachael Hwee Ling and Low, Bryan Kian Hsiang",
    "misc; eprint=2605.07930; archiveprefix=arXiv",
)
HUANG = Reference(
    "huang2025steps",
    "Huang and Xie",
    2025,
    "Steps Adaptive Decay DPSGD: Enhancing Performance on Imbalanced Datasets with Differential Privacy with HAM10000",
    "Huang, Xiaobo and Xie, Fang",
    "misc; eprint=2507.06619; archiveprefix=arXiv",
)
ANDREW = Reference(
    "andrew2021differentially",
    "Andrew et al.",
    2021,
    "Differentially Private Learning with Adaptive Clipping",
    "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
    "inproceedings; booktitle=Advances in Neural Information Processing Systems; volume=34",
)
ZHAO = Reference(
    "zhao2025mitigating",
    "Zhao et al.",
    2025,
    "Mitigating Disparate Impact of Differentially Private Learning through Bounded Adaptive Clipping",
    'Zhao, Linzh and Rehn, Aki and Heikkil{\\"a}, Mikko A. and Tajeddine, Razane and Honkela, Antti',
    "misc; eprint=2506.01396; archiveprefix=arXiv",
)
SOLEYMANI = Reference(
    "soleymani2025softadaclip",
    "Soleymani et al.",
    2025,
    "SoftAdaClip: A Smooth Clipping Strategy for Fair and Private Model Training",
    "Soleymani, Dorsa and Dadsetan, Ali and Rudzicz, Frank",
    "misc; eprint=2510.01447; archiveprefix=arXiv",
)
SAGAWA = Reference(
    "sagawa2020distributionally",
    "Sagawa et al.",
    2020,
    "Distributionally Robust Neural Networks for Group Shifts: On the Importance of Regularization for Worst-Case "
    "Generalization",
    "Sagawa, Shiori and Koh, Pang Wei and Hashimoto, Tatsunori B. and Liang, Percy",
    "inproceedings; booktitle=International Conference on Learning Representations",
)
TANG = Reference(
    "tang2024dpadambc",
    "Tang et al.",
    2024,
    "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)",
    "Tang, Qiaoyue and Shpilevskiy, Frederick and L{\\'e}cuyer, Mathias",
    "inproceedings; booktitle=AAAI Conference on Artificial Intelligence; volume=38",
)
